"""The documentation site: it builds, its links work, and the generated reference is complete."""

from __future__ import annotations

import importlib.util
import re
import runpy
import sys
import urllib.parse
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import longspan
from longspan.cli import COMMANDS
from longspan.core.reading import flags_of
from longspan.train.arguments import Ours
from tests.pool import run_forked

pytestmark = pytest.mark.launcher

ROOT = Path(__file__).parents[2]
PAGES = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]


def _build() -> None:
    with mock.patch.object(sys, "argv", ["build_site.py"]):
        runpy.run_path(str(ROOT / "docs" / "build_site.py"), run_name="__main__")


@pytest.fixture(scope="module")
def site() -> Path:
    run_forked(_build)
    return ROOT / "build" / "site"


def _ids(page: Path) -> set[str]:
    return set(re.findall(r'\bid="?([^"\s>]+)', page.read_text())) | {""}


def test_links_of_the_built_site(site: Path) -> None:
    ids = {page: _ids(page) for page in site.rglob("*.html")}
    broken = []
    for page in ids:
        for link in re.findall(r'\b(?:href|src)="?([^"\s>]+)', page.read_text()):
            url = urllib.parse.urlsplit(link.replace("&amp;", "&"))
            if url.scheme or page.name == "404.html":
                continue
            target = (page.parent / urllib.parse.unquote(url.path)).resolve() if url.path else page
            target = target / "index.html" if target.is_dir() else target
            fragment = urllib.parse.unquote(url.fragment)
            if not target.exists() or (target in ids and fragment not in ids[target]):
                broken.append(f"{page.relative_to(site)}: {link}")
    assert broken == []


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_cut_off(site: Path, browser: Any, width: int) -> None:
    """On a phone only the aligned columns of an output scroll."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    for page in (
        "",
        "explanation/ulysses",
        "tutorials/your-script",
        "notebooks/planner",
        "reference/models",
        "reference/cli",
    ):
        browser.get((site / page / "index.html").as_uri())
        assert browser.execute_script(CUT_OFF) == [], page


CUT_OFF = """
    const parts = document.querySelectorAll("html, .picture, pre > code, table, .md-typeset__scrollwrap");
    const scrolls = (e) => innerWidth < 600 && e.closest(".language-text");
    const cut = (e) => e.scrollWidth > e.clientWidth + 1 && !scrolls(e);
    return [...parts].filter(cut).map((e) => e.outerHTML.slice(0, 200));
"""


def test_every_public_name_has_its_docstring(site: Path) -> None:
    found = set().union(*(_ids(page) for page in (site / "reference" / "python").rglob("*.html")))
    assert [name for name in longspan.__all__ if f"longspan.{name}" not in found and name != "exchange"] == []
    assert "longspan.SequenceSharding.shard" in found and "longspan.checkpoint.save" in found


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_has_its_help(site: Path, command: str) -> None:
    module, config, _ = COMMANDS[command]
    page = (site / "reference" / "flags" / command / "index.html").read_text()
    config_class = getattr(importlib.import_module(module), config) if config else Ours  # train parses TRL's keys, too
    flags = [name.replace("_", "-") for name in flags_of(config_class)]
    assert [flag for flag in flags if f"<code>--{flag}</code>" not in page] == []


def test_every_page_is_in_the_navigation_and_in_the_list_of_pages() -> None:
    navigation = re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(navigation) == len(set(navigation))
    assert set(PAGES) - {"README.md"} <= set(navigation)
    assert {f"reference/flags/{command}.md" for command in COMMANDS} <= set(navigation)
    listed = re.findall(r"\]\((\S+\.md)\)", (ROOT / "docs" / "README.md").read_text())
    assert set(PAGES) - {"README.md"} <= set(listed)
    notebooks = {f"notebooks/{path.stem}.md" for path in (ROOT / "docs" / "notebooks").glob("*.ipynb")}
    assert len(notebooks) == 2 and notebooks <= set(navigation)


def test_the_list_for_language_models_names_every_page(site: Path) -> None:
    links = re.findall(r"^- \[.*?\]\((.*?)\): \S", (site / "llms.txt").read_text(), re.MULTILINE)
    assert {page for page in PAGES if page != "README.md"} <= set(links)
    assert [link for link in links if not (site / link).exists()] == []
    assert "(Picture: Ulysses on four ranks" in (site / "explanation" / "ulysses.md").read_text()


def _script(name: str) -> Any:
    """Import a script of docs/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_pages_repeat_what_the_code_has() -> None:
    """Run `python docs/build_site.py --fill` after a change of a flag or of a function that a trail names."""
    for page, filled in _script("build_site").FILLED.items():
        assert filled(page.read_text()) == page.read_text(), page.name


def test_drawn_pictures_are_those_of_the_script() -> None:
    """Run `python docs/draw_methods.py` after a change of it, or of a layout or mask."""
    script = _script("draw_methods")
    for draw in script.PICTURES:
        if draw.__name__ != "memory":  # the planner's figures move with every better estimate
            committed = ROOT / "docs" / "pictures" / f"{draw.__name__.replace('_', '-')}.svg"
            assert committed.read_text() == draw().svg(), committed.name


def test_every_method_has_a_drawn_picture() -> None:
    methods = ["ulysses", "ring", "zigzag", "usp", "tensor-axis", "megatron-sp", "state-passing", "dsp", "fsdp"]
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*/*.md"))
    assert [name for name in methods if f"](../pictures/{name}.svg)" not in pages] == []


def test_pages_are_short() -> None:
    """Tables and lists of flags are looked up, not read."""
    looked_up = re.compile(r"^(\||- `--).*", re.MULTILINE)
    texts = {page: looked_up.sub("", (ROOT / "docs" / page).read_text()) for page in PAGES}
    long = {page: len(text.split()) for page, text in texts.items()}
    assert {page: words for page, words in long.items() if words > 1200} == {}
    assert sum(long.values()) <= 17_000
