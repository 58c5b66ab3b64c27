"""What README.md and docs/ tell the reader to type works: commands parse, make targets exist, Python blocks run."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from markdown_it import MarkdownIt

import longspan
from tests.pool import run_forked

pytestmark = pytest.mark.versions

ROOT = Path(__file__).parents[2]
PAGES = sorted(p for p in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")] if p.is_file())

NO_RUN = "<!-- no-run -->"
"""Before a Python block: it is compiled, not run, because it needs several ranks, a GPU, or the network."""


@dataclass(frozen=True)
class Block:
    """A fenced block. `line` is the page's line that its code begins on."""

    page: Path
    line: int
    language: str
    source: str
    runs: bool


def blocks_of(page: Path) -> Iterator[Block]:
    previous = ""
    for token in MarkdownIt().parse(page.read_text()):
        if token.type == "fence" and token.map:
            language = (token.info.split() or [""])[0]
            yield Block(page, token.map[0] + 2, language, token.content, NO_RUN not in previous)
        if token.type in ("fence", "html_block", "inline"):
            previous = token.content if token.type == "html_block" else ""


def commands_of(block: Block) -> Iterator[list[str]]:
    """The commands of a shell block, split into words, without prompts and variable assignments."""
    text = re.sub(r"\\\n\s*", " ", block.source)
    for line in text.splitlines():
        words = shlex.split(line.strip().removeprefix("$ "), comments=True)
        command: list[str] = []
        for word in [*words, "&&"]:
            if word not in ("&&", "||", ";", "|"):
                command.append(word)
                continue
            while command and re.fullmatch(r"[A-Z_]+=.*", command[0]):
                command.pop(0)
            if command:
                yield command
            command = []


def _all_commands() -> list[tuple[str, list[str]]]:
    shells = ("bash", "sh", "shell", "console")
    blocks = [block for page in PAGES for block in blocks_of(page) if block.language in shells]
    return [(f"{b.page.relative_to(ROOT)}:{b.line}", command) for b in blocks for command in commands_of(b)]


COMMANDS = _all_commands()


def check_longspan(args: list[str]) -> None:
    """Everything but the job itself: the command is known, its flags parse, and its `--config` file too."""
    from longspan.cli import COMMANDS, main

    if args[:1] == ["train"]:  # it parses TRL's keys
        from longspan.core.errors import LongspanError
        from longspan.train.arguments import read

        try:
            with contextlib.chdir(ROOT):
                assert read(args[1:]).ours.parallel.ranks
        except LongspanError as error:
            raise AssertionError(f"longspan {shlex.join(args)} ended with 2: {error}") from error
        return
    with contextlib.ExitStack() as stack, contextlib.chdir(ROOT):
        for module, _, _ in COMMANDS.values():
            stack.enter_context(mock.patch(f"{module}.run", return_value=0))
        code = main(args)
    assert code == 0, f"longspan {shlex.join(args)} ended with {code}"


def check_make(args: list[str]) -> None:
    """A dry run: fails for a target that is not there."""
    done = subprocess.run(["make", "-n", *args], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def check_python(args: list[str]) -> None:
    if args[:2] == ["-m", "longspan"]:
        check_longspan(args[2:])
    elif args and args[0].endswith(".py"):
        assert (ROOT / args[0]).is_file(), f"{args[0]} does not exist"


def check_torchrun(args: list[str]) -> None:
    if "longspan" in args:
        check_longspan(args[args.index("longspan") + 1 :])


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "longspan": check_longspan,
    "make": check_make,
    "python": check_python,
    "python3": check_python,
    "torchrun": check_torchrun,
    "srun": check_torchrun,
}


@pytest.mark.parametrize(("where", "command"), COMMANDS, ids=[f"{where} {' '.join(c)[:60]}" for where, c in COMMANDS])
def test_command(where: str, command: list[str]) -> None:
    check = CHECKS.get(Path(command[0]).name)
    if check is not None:
        check(command[1:])


def test_scripts_for_clusters_parse_and_agree() -> None:
    page = ROOT / "docs" / "how-to" / "several-nodes.md"
    blocks = {block.source.partition("\n")[0]: block for block in blocks_of(page)}
    script = blocks["#!/bin/bash"].source
    subprocess.run(["bash", "-n", "-c", script], check=True)
    assert script.rindex("#SBATCH") < script.index("set -euo")  # Slurm reads options only above the first command
    slurm = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", script, re.MULTILINE))
    assert slurm["signal"].startswith("TERM@") and slurm["ntasks-per-node"] == slurm["gpus-per-node"]

    manifest = yaml.safe_load(blocks["apiVersion: jobset.x-k8s.io/v1alpha2"].source)
    (replicated,) = manifest["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    command = container["command"][2]
    subprocess.run(["bash", "-n", "-c", command], check=True)
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert job["parallelism"] == job["completions"] == int(slurm["nodes"]) and job["completionMode"] == "Indexed"
    assert f"--nnodes {job['completions']} --nproc-per-node {gpus} --node-rank $JOB_COMPLETION_INDEX" in command
    # The first pod's host name: JobSet, replicated job, its index, the pod's index; in the subdomain of the JobSet.
    name, (port,) = manifest["metadata"]["name"], container["ports"]
    address = f"--master-addr {name}-{replicated['name']}-0-0.{name} --master-port {port['containerPort']}"
    assert address in command
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    trains = [text[text.index("longspan train") :].split() for text in (script, command)]
    assert trains[0] == trains[1]
    assert int(trains[0][-1]) < min(int(slurm["signal"][5:]), pod["terminationGracePeriodSeconds"])


def test_every_command_is_in_the_readme_and_in_the_reference() -> None:
    from longspan.cli import COMMANDS as known

    readme = " ".join((ROOT / "README.md").read_text().split())
    assert [name for name in known if f"`longspan {name}" not in readme and f" longspan {name} " not in readme] == []
    reference = (ROOT / "docs" / "reference" / "cli.md").read_text()
    assert [name for name in known if f"## `longspan {name}`" not in reference] == []


def test_links_point_to_pages_and_headings() -> None:
    broken = []
    for page in [*PAGES, ROOT / "benchmarks" / "README.md"]:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            path, _, heading = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if "://" in link or (target.exists() and (not heading or heading in _headings(target))):
                continue
            broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


def _headings(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_named_modules_exist() -> None:
    """Every `path/to/module.py` that a page names is in the package, the tests, the benchmarks or the examples."""
    missing = [
        f"{page.relative_to(ROOT)}: {path}"
        for page in PAGES
        for path in re.findall(r"`([a-z_]+(?:/[a-z_]+)+\.py)`", page.read_text())
        if not any((ROOT / base / path).exists() for base in (".", "src", "src/longspan"))
    ]
    assert missing == []


def test_errors_and_docstrings_point_to_pages() -> None:
    sources = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    named = {name for text in sources for name in re.findall(r"docs/[\w/-]+\.md", text)}
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_diff_of_the_readme_is_a_script_with_the_lines_of_the_tutorial() -> None:
    (diff,) = (block.source for block in blocks_of(ROOT / "README.md") if block.language == "diff")
    added = [line[1:] for line in diff.splitlines() if line.startswith("+")]
    compile("\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-")), "README.md", "exec")
    tutorial = (ROOT / "docs" / "tutorials" / "your-script.md").read_text().replace("ulysses=1", "ulysses=4")
    assert [line for line in added if line.partition("  #")[0] not in tutorial] == []


def test_the_api_page_has_the_signatures_of_the_code() -> None:
    page = re.sub(r"\n +", " ", (ROOT / "docs" / "reference" / "api.md").read_text())
    wrong = []
    for section in page.split("\n## ")[1:]:
        module = re.match(r".*`(longspan\.\w+)`", section)
        for name, written in re.findall(r"`([\w.]+)(\([^`]*\))`(?=[:,\n])", section):
            function = _public(name, module[1] if module else "longspan")
            if (signature := _signature(function)) != written:
                wrong.append(f"{name}{signature}")
    assert wrong == []
    assert [name for name in longspan.__all__ if f"{name}(" not in page and f"{name}`" not in page] == []


def _public(name: str, module: str) -> Any:
    if name.startswith("sp."):
        return getattr(longspan.SequenceSharding, name.removeprefix("sp."))
    path, _, last = f"{module}.{name}".rpartition(".")
    return getattr(importlib.import_module(path), last)


def _signature(function: Any) -> str:
    """Return the signature without `self` and annotations."""
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values() if p.name != "self"]
    text = str(signature.replace(parameters=parameters, return_annotation=signature.empty)).replace("'", '"')
    return re.sub(r"<function (\w+) at \w+>", r"\1", text)


def test_every_make_target_is_told_of() -> None:
    targets = re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    told = "\n".join((ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md"))
    assert {"test", "fuzz"} <= set(targets)
    assert [name for name in targets if not re.search(rf"make (.* )?{name}\b", told)] == []


def test_the_demo_installs_only_what_it_needs(tmp_path: Path) -> None:
    """The tests need more, which contains it."""
    for target, extras in (("demo", ["train"]), ("lint", ["train,diffusers,dev"])):
        dry = ["make", "-n", f"VENV={tmp_path / 'venv'}", target]
        done = subprocess.run(dry, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert re.findall(r'--editable "\.\[(.*)\]"', done.stdout) == extras, done
        assert done.stdout.count("-m venv ") == 1


def _run_blocks(sources: list[tuple[str, str, bool]], folder: Path) -> None:
    """Run the blocks of one page in order in one namespace."""
    os.chdir(folder)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for where, source, runs in sources:
        code = compile(source, where, "exec")
        if runs:
            exec(code, namespace)


WITH_PYTHON = [page for page in PAGES if any(block.language == "python" for block in blocks_of(page))]


@pytest.mark.launcher
@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    """Each page has its own process."""
    blocks = [block for block in blocks_of(page) if block.language == "python"]
    # Blank lines before the code give a traceback the page's own line numbers.
    sources = [(str(page), "\n" * (block.line - 1) + block.source, block.runs) for block in blocks]
    run_forked(_run_blocks, sources, tmp_path)


def _run_notebook(path: Path) -> None:
    spec = importlib.util.spec_from_file_location("run_notebooks", ROOT / "docs" / "run_notebooks.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    def check_shell(command: str) -> str:
        """Check that it parses, as in pages."""
        for words in commands_of(Block(path, 0, "bash", command, True)):
            CHECKS.get(words[0], lambda args: None)(words[1:])
        return "checked"

    notebook = json.loads(path.read_text())
    printed = list(script.execute(notebook, check_shell))
    assert [bool(text) for text in printed] == [bool(cell["outputs"]) for cell in script.code_cells(notebook)]


@pytest.mark.launcher
@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_run(path: Path) -> None:
    """Cells run in order; where the stored notebook shows output, there is some."""
    run_forked(_run_notebook, path)


@pytest.mark.parametrize("target", [["no-such-target"], ["demo", "tset"]])
def test_a_make_target_that_is_missing_is_noticed(target: list[str]) -> None:
    with pytest.raises(AssertionError, match="No rule to make target"):
        check_make(target)


@pytest.mark.parametrize(
    "args",
    [
        ["trian"],
        ["train", "sft", "--contxt", "8192"],
        ["verify", "--ulysses", "many"],
        ["train", "sft", "--config", "no/such.yaml"],
    ],
    ids=" ".join,
)
def test_a_command_line_that_does_not_parse_is_noticed(args: list[str]) -> None:
    with pytest.raises(AssertionError, match="ended with 2"):
        check_longspan(args)


def test_blocks_and_commands_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Text\n\n```bash\n# a comment\nA=1 longspan train --context 8 \\\n    --ulysses 2 && make demo  # both\n```\n\n"
        "<!-- no-run -->\n```python\nx = 1\n```\n\n```python\ny = 2\n```\n"
    )
    shell, compiled, executed = blocks_of(page)
    assert list(commands_of(shell)) == [["longspan", "train", "--context", "8", "--ulysses", "2"], ["make", "demo"]]
    assert (compiled.runs, compiled.line, compiled.source) == (False, 11, "x = 1\n")
    assert (executed.runs, executed.line, executed.source) == (True, 15, "y = 2\n")
