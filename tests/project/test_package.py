"""The wheel and the sdist that a release uploads contain what a user needs, and nothing of the checkout."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

import longspan
from longspan.core.errors import EXTRAS
from longspan.train.arguments import read
from tests.project.packages import UNPINNED, USES

ROOT = Path(__file__).parents[2]


def build(source: Path, out: Path, *targets: str) -> None:
    """Build in `source` with the installed hatchling, which needs no network."""
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(out)]
    flags = [part for target in targets for part in ("--target", target)]
    subprocess.run([*command, *flags], cwd=source, check=True, capture_output=True, timeout=120)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """The unpacked sdist."""
    folder = tmp_path_factory.mktemp("sdist")
    build(ROOT, folder, "sdist")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory) -> Path:
    """The wheel, built from the sdist alone, as installers do where they find no wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    build(sdist, folder, "wheel")
    (found,) = folder.glob("*.whl")
    return found


def test_wheel_contains_every_module_and_nothing_else(wheel):
    tracked = subprocess.run(["git", "ls-files", "src/longspan"], cwd=ROOT, capture_output=True, text=True, check=True)
    expected = {name.removeprefix("src/") for name in tracked.stdout.split() if (ROOT / name).exists()}
    with zipfile.ZipFile(wheel) as opened:
        held = {name for name in opened.namelist() if ".dist-info/" not in name}
    assert held == expected


def test_metadata_names_version_extras_and_license(wheel):
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (n for n in opened.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(opened.read(name).decode())
    assert metadata["Version"] == longspan.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    extras = set(metadata.get_all("Provides-Extra"))
    assert set(EXTRAS.values()) <= extras  # every extra that an error message names
    assert {"train", "eval", "fla", "diffusers", "all"} <= extras


def test_extra_all_contains_every_other_but_the_projects_own_and_two_that_exclude_versions():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    def reached(name: str) -> set[str]:
        nested = [re.fullmatch(r"longspan\[(.*)\]", requirement) for requirement in extras[name]]
        inner = {part for match in nested if match for part in match[1].split(",")}
        return {name}.union(*(reached(part) for part in inner))

    assert reached("all") == set(extras) - {"docs", "dev", "bench"} - UNPINNED


def test_commands_of_the_extras_parse():
    commands = [use.split() for uses in USES.values() for use in uses if use.startswith("train ")]
    with contextlib.chdir(ROOT):
        assert len(commands) > 4 and all(read(words[1:]).ours.parallel.ranks == 2 for words in commands)


def test_version_is_written_once():
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited is not None and cited[1] == longspan.__version__
    assert f"## {longspan.__version__} " in (ROOT / "CHANGELOG.md").read_text()


def test_installed_wheel_runs_outside_the_checkout(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(tmp_path / "site")
    code = "import longspan; print(longspan.__file__); from longspan.cli import main; main()"
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-c", code, "plan", "--help"]
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(str(tmp_path / "site"))
    assert "usage: longspan plan" in run.stdout
