"""Validation of numbers, paths, files and TOML."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from longspan.core.errors import LongspanError
from longspan.core.validation import (
    check_number,
    check_output,
    existing_path,
    format_value,
    means_a_path,
    path_of,
    read_text,
    read_toml,
)


@pytest.mark.parametrize(
    ("value", "options", "text"),
    [
        (0, {}, "--x must be at least 1, got 0"),
        (8, {}, "--x must be at most 7, got 8"),
        (1, {"above": True}, "--x must be above 1, got 1"),
        (7, {"below": True}, "--x must be below 7, got 7"),
        (math.nan, {}, "--x must be at least 1 and at most 7, got nan"),
        (math.inf, {}, "--x must be at most 7, got inf"),
        (-math.inf, {}, "--x must be at least 1, got -inf"),
        (math.inf, {"most": math.inf}, "--x must be finite and at least 1, got inf"),
        (math.nan, {"least": -math.inf, "most": math.inf}, "--x must be finite, got nan"),
        (2.0, {"whole": True}, "--x must be an integer at least 1 and at most 7, got 2.0"),
        (True, {}, "--x must be a number at least 1 and at most 7, got True"),
        ("3", {}, "--x must be a number at least 1 and at most 7, got '3'"),
        (None, {}, "--x must be a number at least 1 and at most 7, got None"),
    ],
)
def test_numbers_out_of_range_raise(value: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(LongspanError) as error:
        check_number("--x", value, **{"least": 1, "most": 7, **options})
    assert str(error.value) == text


def test_numbers_in_range_and_numbers_too_long_to_print() -> None:
    for value in (1, 7, 3.5):
        check_number("--x", value, 1, 7)
    check_number("--x", -(10**400), whole=True)
    with pytest.raises(LongspanError, match=r"^--x must be an integer, got 0\.5$"):
        check_number("--x", 0.5, whole=True)
    with pytest.raises(LongspanError, match="--x must be at most 7, got a value of type int that cannot be printed"):
        check_number("--x", 10**5000, 1, 7)


def test_long_values_are_cut_in_messages() -> None:
    assert len(format_value("x" * 10_000)) < 110 and "(10002 characters)" in format_value("x" * 10_000)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("", "--x is empty"),
        ("a\0b", "NUL byte"),
        ("~nobody-of-this-name/x", "no user of that name"),
        ("x" * 300, "too long for a path"),
        ("x/" * 2100, "too long for a path"),
    ],
)
def test_invalid_paths_raise(path: str, text: str) -> None:
    for check in (path_of, existing_path):
        with pytest.raises(LongspanError, match=text):
            check("--x", path)


def test_home_is_expanded_and_a_broken_link_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert path_of("--x", "~/a") == tmp_path / "a"
    assert existing_path("--x", "~/a") is None
    (tmp_path / "a").symlink_to("gone")
    with pytest.raises(LongspanError, match=r"--x .*/a is a link to gone, which does not exist"):
        existing_path("--x", "~/a")


def test_hub_names_are_not_paths() -> None:
    for name in ("gpt2", "meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-0.5B", "owner/set:20220301.en", "_x/y_z"):
        assert not means_a_path(name), name
    for path in ("./x", "/x", "~/x", "../x", "a/b/c", "x/", "nope.json", "data.jsonl", "s3://x/y", "a b", "a*", ""):
        assert means_a_path(path), path


def test_check_output_creates_nothing(tmp_path: Path) -> None:
    check_output("--x", tmp_path / "new" / "deep" / "file")
    check_output("--x", tmp_path, folder=True)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("gone")
    for path, folder, message in (
        (tmp_path, False, f"is a folder; give a file, such as --x {tmp_path}/e"),
        (tmp_path / "file", True, "is a file; give a folder"),
        (tmp_path / "file" / "under", False, "file is not a folder; give another file"),
        (tmp_path / "link" / "under", True, "link is a link to nothing"),
    ):
        with pytest.raises(LongspanError) as error:
            check_output("--x", path, folder=folder, example="e")
        assert message in str(error.value)


def test_files_that_are_no_text_raise(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "latin").write_bytes(b"\xe4")
    for name, message in (
        ("gone", "No such file"),
        (".", "not a regular file"),
        ("pipe", "not a regular file"),
        ("latin", "not UTF-8 text"),
    ):
        with pytest.raises(LongspanError, match=message):
            read_text("--x", tmp_path / name)
    with pytest.raises(LongspanError, match="not a regular file"):
        read_text("--x", Path("/dev/zero"))


def test_toml_errors_have_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('\ufeff# first\n"a-b" = 1\n[t]\nx = 2\n[t.u]\ny = {z = 3}\nq.r = 4\n')
    file = read_toml("--x", path)
    assert file.values == {"a-b": 1, "t": {"x": 2, "u": {"y": {"z": 3}, "q": {"r": 4}}}}
    lines = [file.where(*keys).rpartition(" ")[2] for keys in (("a-b",), ("t",), ("t", "x"), ("t", "u", "y", "z"))]
    assert lines == ["2", "3", "4", "6"]
    assert file.where("t", "u", "q", "r").endswith("line 7") and file.where("nope") == str(path)
    assert str(file.error("is odd", "t", "x")) == f"--x {path}, line 4: is odd"
    for text, message in (
        ("a = 1\na = 2", "line 2"),
        ("a = " + "1" * 5000, "is not TOML"),
        ("a = " + "[" * 20_000, "nested too deeply"),
    ):
        path.write_text(text)
        with pytest.raises(LongspanError, match=message):
            read_toml("--x", path)
