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

ROOT = Path(__file__).parents[1]
MODULES = sorted({"longspan", *(m.name for m in pkgutil.walk_packages(longspan.__path__, "longspan."))})

# Each of these takes seconds to import or touches a device.
HEAVY = ("torch", "transformers", "numpy", "datasets", "pyarrow", "tensorboard", "peft")

REPORT_HEAVY = f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"

# Import the libraries first, as their effects are not longspan's.
IMPORT_ALL = """
import contextlib, importlib, json, os, sys
modules, libraries, folder = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
for name in libraries:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
import torch, torch.distributed
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


def test_import_prints_nothing_and_changes_nothing(tmp_path: Path) -> None:
    modules = [name for name in MODULES if not name.endswith("__main__")]
    if importlib.util.find_spec("lm_eval") is None:  # a plug-in of an optional package
        modules.remove("longspan.lm_eval.model")
    _python("-c", IMPORT_ALL, json.dumps(modules), json.dumps(HEAVY), str(tmp_path))
    state = json.loads((tmp_path / "state.json").read_text())
    assert state == {name: {"printed": "", "environment": [], "touched": False} for name in modules}


def test_every_file_is_a_module() -> None:
    assert {"longspan.core.layout", "longspan.comm.mesh", "longspan.comm.all_to_all"} <= set(MODULES)
    sources = Path(longspan.__file__).parent
    on_disk = {
        ".".join(("longspan", *p.relative_to(sources).with_suffix("").parts)).removesuffix(".__init__")
        for p in sources.rglob("*.py")
    }
    assert on_disk == set(MODULES), os.linesep.join(sorted(on_disk ^ set(MODULES)))


def test_the_oldest_versions_are_the_lower_bounds() -> None:
    """`make oldest` installs the lower bounds of the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *(line for name in ("hf", "train", "peft", "plot", "trl") for line in extras[name]),
    ]
    floors = dict(re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(wanted), re.MULTILINE))
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    # A bound may be shorter than a version: 3 is 3.0.0.
    padded = {name: ".".join([*version.split("."), "0", "0"][:3]) for name, version in floors.items()}
    assert pinned == padded


def test_public_names_are_functions_whatever_was_imported_before() -> None:
    running = []
    for first in ("longspan.attn.methods.ulysses", "longspan.hf.parallelize"):  # and none first: README's lines
        code = (
            f"import {first}, longspan, inspect\n"
            "for name in ('attention', 'parallelize', 'shard_batch', 'init_mesh', 'causal_lm_loss'):\n"
            "    assert inspect.isfunction(getattr(longspan, name)), name\n"
            "import longspan.exchange\n"
            "from longspan import exchange\n"
            "assert all(inspect.isfunction(getattr(exchange, name)) for name in exchange.__all__)\n"
        )
        running.append(subprocess.Popen([sys.executable, "-c", code]))
    assert [process.wait(timeout=120) for process in running] == [0, 0]


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
    code = """
import sys
sys.modules["accelerate"] = None
import longspan
try:
    longspan.trainer
except longspan.LongspanError as error:
    print(error)
"""
    assert _python("-c", code).stdout == (
        "longspan.trainer needs accelerate, which is not installed; install longspan with its extra 'train' "
        '(pip install ".[train]"), or pip install accelerate\n'
    )
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert main(["train", "--data", "pydoc", "--out", "never-written"]) == 2
    assert "longspan train needs tensorboard, which is not installed" in capsys.readouterr().err
