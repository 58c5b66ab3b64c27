"""`longspan explain`: pages and codes of errors in the terminal; every code has an entry with the text of its error."""

from __future__ import annotations

import ast
import pickle
import re
import tomllib
from pathlib import Path

import pytest

import longspan
from longspan import pages
from longspan.cli import main
from longspan.core.errors import LongspanError, not_installed

ROOT = Path(__file__).parent.parent
ENTRIES = re.findall(r"^### (LS\d+): ", (ROOT / "docs" / "reference" / "errors.md").read_text(), re.MULTILINE)


def _texts_by_code() -> dict[str, str]:
    """The text of every error with a code, from the sources; "..." stands for each value."""
    found: dict[str, str] = {}
    for path in (ROOT / "src").rglob("*.py"):
        source = path.read_text()
        if not re.search(r"\bLS\d{3}\b", source):
            continue
        tree = ast.parse(source)
        constants = {
            node.targets[0].id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                codes = [k.value.value for k in node.keywords if k.arg == "code" and isinstance(k.value, ast.Constant)]
                text = _text(node.args[0], constants) if codes else ""
                if not re.search("[a-z]", text):  # made elsewhere in the module
                    text = "\n".join(
                        _text(each, constants) for each in ast.walk(tree) if isinstance(each, ast.JoinedStr)
                    )
                for code in codes:
                    found[code] = f"{found.get(code, '')}\n{text}"
            elif isinstance(node, ast.JoinedStr | ast.Constant):
                text = _text(node, constants)
                for code in re.findall(r"\[(LS\d{3})\]", text):
                    found[code] = f"{found.get(code, '')}\n{text}"
    return found


def _text(node: ast.AST, constants: dict[str, ast.expr]) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, constants) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _text(node.value, constants)
    if isinstance(node, ast.Name) and node.id in constants:
        return _text(constants[node.id], {})
    return "..."


TEXTS = _texts_by_code()


def test_each_code_has_an_entry_and_each_entry_a_code() -> None:
    assert sorted(ENTRIES) == sorted(TEXTS)
    assert len(set(ENTRIES)) == len(ENTRIES) >= 12


@pytest.mark.parametrize("code", ENTRIES)
def test_an_entry_quotes_its_error(code: str) -> None:
    quotes = re.findall(r"(?:^>.*\n)+", pages.entry(code), re.MULTILINE)
    assert quotes
    for quote in quotes:
        parts = " ".join(re.sub(r"^> ?", "", quote, flags=re.MULTILINE).split()).split("...")
        unknown = [part for part in map(str.strip, parts) if part not in TEXTS[code]]
        assert unknown == [], TEXTS[code]


def test_the_code_is_in_the_text_of_the_error() -> None:
    error = not_installed("the test", "peft")
    assert str(error).endswith(" [LS101]") and str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(LongspanError("no code")) == "no code"
    with pytest.raises(LongspanError, match=r"needs 3 processes.*\[LS102\]$"):
        longspan.init_mesh(ulysses=3)


@pytest.mark.parametrize("width", ["80", "120"])
@pytest.mark.parametrize("topic", [path.stem for path in (ROOT / "docs" / "explanation").glob("*.md")] + ENTRIES[:2])
def test_explain(topic: str, width: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", width)
    assert main(["explain", topic]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= int(width)
    assert "](" not in shown and "<!--" not in shown and "../" not in shown
    path = ROOT / "docs" / "explanation" / f"{topic}.md"
    if path.exists():
        title, *headings = re.findall(
            r"^#+ (.*)", re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S), re.M
        )
        plain = " ".join(shown.split())
        assert all(" ".join(heading.replace("`", "").split()) in plain for heading in [title, *headings])


def test_topics_and_unknown_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    shown = capsys.readouterr().out
    assert all(path.stem in shown for path in (ROOT / "docs" / "explanation").glob("*.md"))
    assert pages.page("lasp-2") == pages.page("state-passing") and pages.page("megatron") == pages.page("megatron-sp")
    assert main(["explain", "ulises"]) == 2
    assert "did you mean 'ulysses'" in capsys.readouterr().err
    assert main(["explain", "LS999"]) == 2
    assert "LS102" in capsys.readouterr().err


def test_a_wheel_has_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders that pyproject.toml puts into a wheel are those that `longspan explain` reads there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for source, target in project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"].items():
        place = tmp_path / target
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(ROOT / source)
    monkeypatch.setattr(pages, "__file__", str(tmp_path / "longspan" / "pages.py"))
    assert pages.page("ulysses") and pages.entry("LS102")
    assert pages.folder() == tmp_path / "longspan" / "docs"
