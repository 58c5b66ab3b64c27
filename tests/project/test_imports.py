"""Importing longspan is fast and has no effects, and every imported name exists."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import longspan
from longspan.cli import main
from longspan.core.errors import EXTRAS

ROOT = Path(__file__).parents[2]
MODULES = sorted({"longspan", *(m.name for m in pkgutil.walk_packages(longspan.__path__, "longspan."))})

# Each of these takes seconds to import or touches a device.
HEAVY = ("torch", "transformers", "numpy", "datasets", "pyarrow", "tensorboard", "peft")

REPORT_HEAVY = f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"

# Each code runs in a fork of one process, which has imported the libraries: the slow part, and their effects are not
# longspan's.
IN_FORKS = """
import contextlib, importlib, json, os, sys, traceback
codes, libraries = json.loads(sys.argv[1]), json.loads(sys.argv[2])
for name in libraries:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
import torch.distributed.fsdp, transformers.modeling_utils
for code in codes:
    pid = os.fork()
    if pid == 0:
        try:
            exec(code, {})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, code
"""

IMPORT_ALL = """
import importlib, json, os, sys, torch, torch.distributed
def import_all(modules, folder):
    state = {}
    for name in modules:
        before = dict(os.environ)
        with open(os.path.join(folder, "output"), "w+") as output:
            saved = [os.dup(1), os.dup(2)]
            for fd in (1, 2):
                os.dup2(output.fileno(), fd)
            importlib.import_module(name)
            sys.stdout.flush(), sys.stderr.flush()
            for fd, old in zip((1, 2), saved):
                os.dup2(old, fd)
            output.seek(0)
            printed = output.read()
        state[name] = {
            "printed": printed,
            "environment": sorted({k for k, v in before.items() ^ os.environ.items()}),
            "touched": torch.cuda.is_initialized() or torch.distributed.is_initialized(),
        }
    json.dump(state, open(os.path.join(folder, "state.json"), "w"))
"""

# After a module whose package has a function's name was imported.
PUBLIC_NAMES = """
import {first}, longspan, inspect
for name in ('attention', 'parallelize', 'shard_batch', 'init_mesh', 'causal_lm_loss'):
    assert inspect.isfunction(getattr(longspan, name)), name
import longspan.exchange
from longspan import exchange
assert all(inspect.isfunction(getattr(exchange, name)) for name in exchange.__all__)
"""

WITHOUT_ACCELERATE = """
import sys
sys.modules["accelerate"] = None
import longspan
try:
    longspan.trainer
except longspan.LongspanError as error:
    print(error)
"""


def _python(*args: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_import_loads_nothing_heavy() -> None:
    done = _python("-c", f"import sys, longspan; {REPORT_HEAVY}")
    assert (done.stdout, done.stderr.strip()) == ("", "[]")


def test_public_names_exist() -> None:
    for name in longspan.__all__:
        assert getattr(longspan, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = longspan.no_such_name


def test_imports_have_no_effects_and_do_not_depend_on_their_order(tmp_path: Path) -> None:
    """No module prints or changes anything; public names are functions; a missing package is named with its extra."""
    modules = [name for name in MODULES if not name.endswith("__main__")]
    if importlib.util.find_spec("lm_eval") is None:  # a plug-in of an optional package
        modules.remove("longspan.lm_eval.model")
    firsts = ("longspan.attn.methods.ulysses", "longspan.hf.parallelize")
    codes = [
        f"{IMPORT_ALL}import_all({modules!r}, {str(tmp_path)!r})",
        *(PUBLIC_NAMES.format(first=first) for first in firsts),
        WITHOUT_ACCELERATE,
    ]
    done = _python("-c", IN_FORKS, json.dumps(codes), json.dumps(HEAVY))
    state = json.loads((tmp_path / "state.json").read_text())
    assert state == {name: {"printed": "", "environment": [], "touched": False} for name in modules}
    assert done.stdout == (
        "longspan.trainer needs accelerate, which is not installed; install longspan with its extra 'train' "
        '(pip install ".[train]"), or pip install accelerate [LS101, see docs/reference/errors.md]\n'
    )


def test_every_file_is_a_module() -> None:
    assert {"longspan.core.layout", "longspan.comm.mesh", "longspan.comm.all_to_all"} <= set(MODULES)
    sources = Path(longspan.__file__).parent
    on_disk = {
        ".".join(("longspan", *p.relative_to(sources).with_suffix("").parts)).removesuffix(".__init__")
        for p in sources.rglob("*.py")
    }
    assert on_disk == set(MODULES), os.linesep.join(sorted(on_disk ^ set(MODULES)))


def test_no_test_module_is_imported_by_others() -> None:
    """Shared helpers are in modules without `test_`, so a test module can be changed alone."""
    tests = (ROOT / "tests").rglob("*.py")
    found = {p.name: re.findall(r"^\s*(?:from|import) tests\.(?:\w+\.)?test_\w+", p.read_text(), re.M) for p in tests}
    assert len(found) > 50 and not {name: lines for name, lines in found.items() if lines}


def _imported_from_longspan(path: Path) -> list[tuple[str, str]]:
    """Return every name that a file imports from longspan, also inside functions, with its module."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("longspan")]
    return [(str(node.module), alias.name) for node in froms for alias in node.names]


def test_names_that_benchmarks_and_examples_import_exist() -> None:
    # No test runs all of them, as they take minutes or need a GPU.
    files = [path for folder in ("benchmarks", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
    imported = {(path.name, *name) for path in files for name in _imported_from_longspan(path)}
    assert len(imported) > 30
    missing = []
    for where, module, name in sorted(imported):
        if not hasattr(importlib.import_module(module), name) and f"{module}.{name}" not in MODULES:
            missing.append(f"{where}: from {module} import {name}")
    assert not missing


def test_a_missing_optional_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package, extra in EXTRAS.items():
        assert any(re.match(rf"{package.replace('_', '-')}\b", wanted) for wanted in extras[extra]), package
    monkeypatch.setitem(sys.modules, "trl", None)
    assert main(["train", "sft"]) == 2
    assert "longspan train needs trl, which is not installed" in capsys.readouterr().err
