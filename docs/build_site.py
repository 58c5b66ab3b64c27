"""Build the documentation site: `make docs`, or python docs/build_site.py [--serve | --fill].

Pages are staged in build/pages: those of docs/, the README as the landing page, every file that a page links to, and a
reference generated from docstrings and from the flags of the command line. Zensical renders them into build/site, and
fails for a link to a page or heading that does not exist. `--fill` only writes what pages repeat of the code: the flags
in docs/reference/cli.md, and the lines of each trail in docs/read-the-code.md.
"""

from __future__ import annotations

import argparse
import ast
import collections
import html
import importlib
import inspect
import json
import posixpath
import re
import shutil
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import longspan
from longspan.cli import COMMANDS
from longspan.core.reading import field_texts, fields_of, flags_of, values

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "build" / "pages"
SITE = ROOT / "build" / "site"
CLI = ROOT / "docs" / "reference" / "cli.md"
LANDING = "README.md"
MOVED = {  # files of the repository that have another path on the site
    LANDING: "index.md",
    "docs/README.md": "pages.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",  # an index.md would be the page of its whole section
    "benchmarks/reports": "benchmarks.md",
}
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json"}
FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2", re.MULTILINE | re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="store_true", help="show the site on localhost:8000 afterwards")
    parser.add_argument("--fill", action="store_true", help="write what pages repeat of the code, and no site")
    args = parser.parse_args()
    if args.fill:
        for page, filled in FILLED.items():
            page.write_text(filled(page.read_text()))
        return
    stage()
    zensical = [sys.executable, "-m", "zensical"]
    done = subprocess.run([*zensical, "build", "--clean", "--strict"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr))
    write_for_models()
    print("build/site/index.html")
    if args.serve:
        subprocess.run([*zensical, "serve"], cwd=ROOT)


def stage() -> None:
    """Write every page of the site into build/pages."""
    shutil.rmtree(PAGES, ignore_errors=True)
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb")]
    waiting = [*map(Path, MOVED), *sorted(path.relative_to(ROOT) for path in pages)]
    done: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in done or (ROOT / path).is_dir():
            continue
        done.add(path)
        if path.suffix not in (".md", ".ipynb"):
            write(site_path(path), as_page(path))
            continue
        text = (ROOT / path).read_text()
        text, linked = relink(from_notebook(text) if path.suffix == ".ipynb" else text, path)
        waiting += [target for target in linked if target.suffix not in (".png", ".svg")]
        for picture in (target for target in linked if target.suffix in (".png", ".svg")):
            copy(picture)
        write(site_path(path), inline(CHANGED.get(path.as_posix(), str)(text), Path(site_path(path)).parent))
    copy(Path("docs/site.css"))
    copy(Path("docs/pictures/icon.svg"))


def write(path: str, text: str) -> None:
    target = PAGES / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def copy(path: Path) -> None:
    target = PAGES / site_path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ROOT / path, target)


# --- links


def site_path(path: Path) -> str:
    """Return where a file of the repository is on the site."""
    name = path.as_posix()
    if name in MOVED:
        return MOVED[name]
    if name.startswith("docs/"):
        return name.removeprefix("docs/").replace(".ipynb", ".md")
    return name if path.suffix in (".md", ".png", ".svg") else f"{name}.md"


def relink(text: str, page: Path) -> tuple[str, list[Path]]:
    """Return a page with the site's links, and the files that it links to. Code blocks stay as they are."""
    linked = []

    def replace(match: re.Match[str]) -> str:
        path, hash_, heading = match[1].partition("#")
        if "://" in path or not path:
            return match[0]
        target = Path(posixpath.normpath((page.parent / path).as_posix()))
        linked.append(target)
        return f"]({posixpath.relpath(site_path(target), posixpath.dirname(site_path(page)) or '.')}{hash_}{heading})"

    parts, at = [], 0
    for fence in [*FENCE.finditer(text), None]:
        end = fence.start() if fence else len(text)
        parts.append(re.sub(r"\]\(([^)\s]+)\)", replace, text[at:end]))
        if fence:
            parts.append(fence[0])
            at = fence.end()
    return "".join(parts), linked


def inline(text: str, folder: Path) -> str:
    """Put drawn pictures into the page, so that they follow its light or dark scheme (docs/site.css)."""

    def drawn(match: re.Match[str]) -> str:
        svg = (PAGES / posixpath.normpath((folder / match[2]).as_posix())).read_text()
        svg = re.sub(r"<style>.*?</style>|\n", "", svg)
        return f'<div class="picture" role="img" aria-label="{html.escape(" ".join(match[1].split()))}">{svg}</div>'

    return re.sub(r"^!\[([^\]]*)\]\(([^)]*\.svg)\)$", drawn, text, flags=re.MULTILINE)


def from_notebook(text: str) -> str:
    """Return a notebook as Markdown: its cells, and what they printed."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        shell = source.startswith("!")
        parts.append(
            source if cell["cell_type"] == "markdown" else f"```{'bash' if shell else 'python'}\n{source}\n```"
        )
        parts += [f"```text\n{''.join(output['text']).rstrip()}\n```" for output in cell.get("outputs", ())]
    return "\n\n".join(parts) + "\n"


def as_page(path: Path) -> str:
    """Return a source file as a page, which the site's search leaves out."""
    code = (ROOT / path).read_text()
    fence = "`" * max(3, 1 + max(map(len, re.findall(r"`{3,}", code)), default=0))
    title = f"---\nsearch: {{exclude: true}}\n---\n\n# {path.name}\n\n`{path.as_posix()}`\n\n"
    return f'{title}{fence}{LANGUAGES.get(path.suffix, "text")} linenums="1"\n{code}{fence}\n'


# --- the generated reference


def api_page(text: str) -> str:
    """Link every public name of the API page to its docstring, on a generated page for each section."""
    intro, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    seen: set[str] = set()
    parts = [intro]
    for number, section in enumerate(sections):
        title, _, body = section.partition("\n")
        heading = title.removeprefix("## ").partition(":")[0]
        page = heading.lower().replace(" ", "-")
        module = re.search(r"`(longspan\.\w+)`", title)
        names = public_names(intro + body if number == 0 else body, module[1] if module else "longspan")
        new = {path: written for path, written in names.items() if path not in seen}
        seen |= set(new)
        docstrings = [f"# {heading}"]
        for path, written in new.items():
            if "SequenceSharding." not in path:  # on the page of its class
                docstrings.append(f"::: {path}\n    options:\n      members: {members(path, written, body)}")
            body = body.replace(written, f"[{written}](python/{page}.md#{path})", 1)
        parts.append(f"{title}\n{body}")
        write(f"reference/python/{page}.md", "\n\n".join(docstrings) + "\n")
    missing = {f"longspan.{name}" for name in longspan.__all__} - seen - {"longspan.exchange"}
    assert not missing, f"docs/reference/api.md does not name {sorted(missing)}"
    return "".join(parts)


def members(path: str, written: str, body: str) -> list[str]:
    """Return the methods and attributes of a class that its entry names; the others are not for users."""
    if path == "longspan.SequenceSharding":
        return re.findall(r"`sp\.(\w+)", body)
    entry = re.split(r"\n- |\n\n", body.partition(written)[2])[0]
    return re.findall(r"`\.?(\w+)(?:\(\))?`", entry)


def public_names(text: str, module: str) -> dict[str, str]:
    """Return the functions and classes that a section of the API page names, as paths, and how it writes them."""
    found: dict[str, str] = {}
    for match in re.finditer(r"`(?:longspan\.)?([A-Za-z_.]+)(\([^`]*\))?`", FENCE.sub("", text)):
        name = match[1].replace("sp.", "SequenceSharding.") if match[1].startswith("sp.") else match[1]
        listed = match[2] is not None and (module != "longspan" or name.startswith("SequenceSharding."))
        if listed or name in longspan.__all__:
            found.setdefault(f"{module}.{name}" if listed else f"longspan.{name}", match[0])
    return found


def cli_page(text: str) -> str:
    """Link the section of each command to a generated page with all its flags."""
    for name, (module, config, summary) in COMMANDS.items():
        config_class = config_of(module, config)
        write(f"reference/flags/{name}.md", flags_page(name, summary, config_class))
        heading = f"## `longspan {name}`\n"
        assert heading in text, f"docs/reference/cli.md has no section {heading}"
        text = text.replace(heading, f"{heading}\n[All flags of `longspan {name}`](flags/{name}.md)\n")
    return text


def with_flags(text: str) -> str:
    """Return docs/reference/cli.md with a line for each flag, from the docstrings that --help prints.

    A flag that several commands explain in the same words is in the list of shared flags.
    """
    texts = {command: texts_of(config_of(module, config)) for command, (module, config, _) in COMMANDS.items()}
    count = collections.Counter(flag for of_command in texts.values() for flag in of_command.items())
    shared = {flag for flag, times in count.items() if times > 1}
    sections: dict[str, dict[str, tuple[str, str]]] = {}
    for name, (words, section) in (flag for flag in count if flag in shared):
        sections.setdefault(section, {})[name] = words, section
    tables = {"shared": "\n\n".join(f"{section}:\n\n{rows_of(flags)}" for section, flags in sections.items())}
    for command, of_command in texts.items():
        known = [(name, section) for name, (text, section) in of_command.items() if (name, (text, section)) in shared]
        also = [f"`--{name.replace('_', '-')}`" for name, section in known if section == "General"]
        also += dict.fromkeys(f"{section.lower()} flags" for _, section in known if section != "General")
        own = {name: text for name, text in of_command.items() if (name, text) not in shared}
        tables[command] = rows_of(own) + f"\n\n[Shared](#flags-that-several-commands-share): {', '.join(also)}."

    def filled(match: re.Match[str]) -> str:
        return f"<!-- flags: {match[1]} -->\n\n{tables.pop(match[1])}\n\n<!-- end -->"

    text = re.sub(r"<!-- flags: (\w+) -->.*?<!-- end -->", filled, text, flags=re.DOTALL)
    assert not tables, f"docs/reference/cli.md has no place for {sorted(tables)}"
    return text


def with_lines(text: str) -> str:
    """Return docs/read-the-code.md with the lines of the functions that each trail names, in tens.

    Raises:
        KeyError: a file has no such function or class.
    """

    def counted(match: re.Match[str]) -> str:
        steps = re.findall(r"\(\.\./(src/longspan/[\w/]+\.py)\) \(([^)]*)\)", match[2])
        lines = 0
        for path, names in steps:
            of_file = lines_of(ROOT / path)
            lines += sum(of_file[name] for name in re.findall(r"`([\w.]+)`", names))
        return f"{match[1]} ({round(lines, -1)} lines)\n{match[2]}"

    trail = r"^(### \d+\. [^\n]*) \(\d+ lines\)\n(.*?)(?=^#|\Z)"
    return re.sub(trail, counted, text, flags=re.MULTILINE | re.DOTALL)


def lines_of(path: Path) -> dict[str, int]:
    """Return the number of lines of each function, class and method of a file; a method is named `Class.method`."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}": each for each in node.body if isinstance(each, ast.FunctionDef)}
    return {name: (node.end_lineno or 0) - node.lineno + 1 for name, node in found.items()}


FILLED = {CLI: with_flags, ROOT / "docs" / "read-the-code.md": with_lines}


def config_of(module: str, config: str) -> type[Any]:
    """Return the class of a command's flags; of `train`, which parses TRL's too, our own."""
    if config:
        return getattr(importlib.import_module(module), config)  # type: ignore[no-any-return]
    from longspan.train.arguments import Ours

    return Ours


def texts_of(config_class: type[Any]) -> dict[str, tuple[str, str]]:
    """Return the text of each flag of a command, and the title of its section."""
    kinds, found = fields_of(config_class), {}
    for name, (holder, _) in flags_of(config_class).items():
        found[name] = field_texts(kinds[holder] if holder else config_class)[name], holder.capitalize() or "General"
    return found


def rows_of(texts: dict[str, tuple[str, str]]) -> str:
    """Return a line for each flag, with the first sentence of its text."""
    firsts = {name: re.split(r"(?<=[.!?]) (?=[A-Z`-])", text)[0].removesuffix(".") for name, (text, _) in texts.items()}
    return "\n".join(f"- `--{name.replace('_', '-')}`: {escaped(first)}" for name, first in firsts.items())


def flags_page(command: str, summary: str, config_class: type[Any]) -> str:
    """Return a page with a table for each section of a command's flags, from the docstrings that --help prints."""
    _, _, doc = inspect.cleandoc(config_class.__doc__ or "").partition("\n\n")
    parts = [f"# longspan {command}", f"{summary[0].upper()}{summary[1:]}.", doc]
    by_section: dict[str, list[str]] = {}
    defaults = values(config_class())
    for name, (text, section) in texts_of(config_class).items():
        kind = flags_of(config_class)[name][1]
        by_section.setdefault(section, []).append(f"- {flag(name, kind, defaults[name])}: {escaped(text)}")
    parts += [f"## {section}\n\n" + "\n".join(lines) for section, lines in by_section.items()]
    return "\n\n".join(filter(None, parts)) + "\n"


def flag(name: str, kind: Any, default: Any) -> str:
    """Return a flag with its choices and its default."""
    kinds = [part for part in typing.get_args(kind) or [kind] if part is not type(None)]
    choices = [f"`{value}`" for kind in kinds for value in (typing.get_args(kind) or [kind]) if isinstance(value, str)]
    if isinstance(default, bool):
        value = "default: on" if default else "default: off"
    elif str(default) in ("None", "", "()", "[]"):
        value = None
    else:
        value = f"default: `{' '.join(map(str, default)) if isinstance(default, tuple) else default}`"
    notes = "; ".join(filter(None, [", ".join(choices), value]))
    return f"**`--{name.replace('_', '-')}`**" + (f" ({notes})" if notes else "")


def escaped(text: str) -> str:
    """Return a docstring as Markdown, with the flags that it names as code."""
    parts = re.split(r"(`[^`]*`|(?<![\w-])--[a-z][\w-]*)", text)  # code and flags are at the odd places
    code = [f"`{part.strip('`')}`" for part in parts[1::2]] + [""]
    return "".join(re.sub(r"([<*_])", r"\\\1", plain) + flag for plain, flag in zip(parts[::2], code, strict=True))


def write_for_models() -> None:
    """Write llms.txt: what the project is, and every page of the navigation as Markdown, with its first sentence."""
    lines = ["# longspan", "", f"> {first_sentence((ROOT / LANDING).read_text())}"]
    for line in (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].splitlines():
        if section := re.fullmatch(r"  - ([^:]+):", line):
            lines += ["", f"## {section[1]}", ""]
        elif page := re.fullmatch(r" +- (?:([^:]+): )?(\S+\.md)", line):
            text = (PAGES / page[2]).read_text()
            title = page[1] or re.search(r"^# (.*)", text, re.MULTILINE)[1]  # type: ignore[index]
            link = page[2]
            if "\n::: " in text:  # docstrings, which only the rendered page has
                link = f"{link.removesuffix('.md')}/"
            else:
                plain = re.sub(r'<div class="picture".*?aria-label="([^"]*)">.*?</div>', r"(Picture: \1)", text)
                (SITE / link).parent.mkdir(parents=True, exist_ok=True)
                (SITE / link).write_text(plain)
            sentence = first_sentence(text)
            lines.append(f"- [{title}]({link})" + (f": {sentence}" if sentence else ""))
    (SITE / "llms.txt").write_text("\n".join(lines) + "\n")


def first_sentence(page: str) -> str:
    """Return the first sentence of a page's first paragraph, without links; of a page of docstrings, their names."""
    if names := re.findall(r"^::: (\S+)$", page, re.MULTILINE):
        return ", ".join(f"`{name}`" for name in names)
    paragraphs = filter(None, map(str.strip, re.split(r"\n\s*\n", FENCE.sub("", page))))
    paragraph = next((text for text in paragraphs if text[0] not in "#!<|-"), "")
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|\*\*", lambda match: match[1] or "", " ".join(paragraph.split()))
    return re.split(r"(?<=[.!?]) (?=[A-Z`])", plain)[0]


CHANGED: dict[str, Callable[[str], str]] = {
    LANDING: "---\nhide: [navigation]\n---\n\n{}".format,
    "docs/reference/api.md": api_page,
    "docs/reference/cli.md": cli_page,
    "docs/reference/errors.md": lambda text: re.sub(
        r"^(?=### LS(\d+))", r'<span id="ls\1"></span>\n\n', text, flags=re.M
    ),
}
"""Pages that are not staged as they are."""


if __name__ == "__main__":
    main()
