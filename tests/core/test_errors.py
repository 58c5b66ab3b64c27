"""Codes of errors: each has an entry in docs/reference/errors.md, which quotes the text of its error."""

from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path

import pytest

import longspan
from longspan.core.errors import LongspanError, not_installed, see

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "errors.md").read_text()
ENTRIES = dict(re.findall(r"^### (LS\d{3}): (.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL))


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
                if codes and not re.search("[a-z]", text):  # made elsewhere in the module
                    text = "\n".join(
                        _text(each, constants) for each in ast.walk(tree) if isinstance(each, ast.JoinedStr)
                    )
                for code in codes:
                    found[code] = f"{found.get(code, '')}\n{text}"
            elif isinstance(node, ast.JoinedStr | ast.Constant):
                text = _text(node, constants)
                for code in re.findall(r"\[(LS\d{3}), see", text):
                    found[code] = f"{found.get(code, '')}\n{text}"
    return found


def _text(node: ast.AST, constants: dict[str, ast.expr]) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, constants) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _text(node.value, constants)
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "see" and isinstance(node.args[0], ast.Constant):
        return see(str(node.args[0].value))
    if isinstance(node, ast.Name) and node.id in constants:
        return _text(constants[node.id], {})
    return "..."


TEXTS = _texts_by_code()


def test_each_code_has_an_entry_and_each_entry_a_code() -> None:
    assert sorted(re.findall(r"^### (LS\d+)", PAGE, re.MULTILINE)) == sorted(TEXTS)


@pytest.mark.parametrize("code", ENTRIES)
def test_an_entry_quotes_its_error(code: str) -> None:
    quotes = re.findall(r"(?:^>.*\n)+", ENTRIES[code], re.MULTILINE)
    assert quotes
    for quote in quotes:
        parts = " ".join(re.sub(r"^> ?", "", quote, flags=re.MULTILINE).split()).split("...")
        unknown = [part for part in map(str.strip, parts) if part not in TEXTS[code]]
        assert unknown == [], TEXTS[code]


def test_the_code_is_in_the_text_of_the_error() -> None:
    error = not_installed("the test", "peft")
    assert str(error).endswith(" [LS101, see docs/reference/errors.md]") and str(
        pickle.loads(pickle.dumps(error))
    ) == str(error)
    assert str(LongspanError("no code")) == "no code"
    with pytest.raises(LongspanError, match=r"needs 3 processes.*\[LS102, see"):
        longspan.init_mesh(ulysses=3)
