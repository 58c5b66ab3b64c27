"""`longspan explain`: a page of the documentation in the terminal, or what an error's code means.

Topics are the pages of docs/explanation, which a wheel contains; codes are headings of docs/reference/errors.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional  # imports no torch; tyro looks the annotation up when it makes the help

from longspan.core.errors import LongspanError
from longspan.core.validation import nearest

_CODE = re.compile(r"LS\d{3}", re.IGNORECASE)


@dataclass(frozen=True)
class ExplainConfig:
    """Print a page of the documentation.

    Without a topic, list the topics.
    """

    topic: Positional[str] = ""
    """A method or another topic (ulysses, ring, memory, ...), or the code of an error (LS102)."""


def run(config: ExplainConfig) -> int:
    """Print the page, the entry of a code, or the list of topics."""
    from rich.console import Console
    from rich.markdown import Markdown

    topic = config.topic.strip()
    if _CODE.fullmatch(topic):
        text = entry(topic.upper())
    elif topic:
        text = page(topic.lower().removesuffix(".md").replace("_", "-").replace(" ", "-"))
    else:
        text = topics()
    Console(highlight=False).print(Markdown(for_terminal(text), code_theme="ansi_dark", hyperlinks=False))
    return 0


def folder() -> Path:
    """Return the folder of the pages: in the package of a wheel, in a checkout its docs/."""
    packaged = Path(__file__).parent / "docs"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "docs"


def page(topic: str) -> str:
    """Return the text of a page of docs/explanation, by its name or a word of its title.

    Raises:
        LongspanError: if there is none, with the nearest one.
    """
    paths = _pages()
    titled = [name for name, path in paths.items() if topic in _title(path).lower().replace(" ", "-")]
    if topic not in paths and len(titled) == 1:
        topic = titled[0]
    if topic not in paths:
        raise LongspanError(
            f"there is no page {topic!r}; {nearest(topic, paths)}, or give the code of an error (LS102)"
        )
    return paths[topic].read_text()


def topics() -> str:
    """Return the topics with the titles of their pages."""
    rows = [f"| {topic} | {_title(path)} |" for topic, path in _pages().items()]
    return "\n".join(["`longspan explain TOPIC`, or the code of an error:", "", "| topic | |", "|---|---|", *rows])


def entry(code: str) -> str:
    """Return the entry of an error's code in docs/reference/errors.md.

    Raises:
        LongspanError: if there is none.
    """
    entries = dict(re.findall(r"^### (LS\d{3})(.*?)(?=^##|\Z)", _errors(), re.MULTILINE | re.DOTALL))
    if code not in entries:
        raise LongspanError(f"no error has the code {code}; there are {', '.join(entries)}")
    return f"# {code}{entries[code]}"


def for_terminal(text: str) -> str:
    """Return Markdown without what a terminal cannot follow: pictures, links to other files, comments."""
    text = re.sub(r"<!--.*?-->\n?|<a id=.*?</a>\n*", "", text, flags=re.DOTALL)
    text = re.sub(r"^!\[([^\]]*)\]\([^)]*\)", r"> Picture: \1", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]*)\]\((?:\.\./explanation/)?([\w-]+)\.md(?:#[\w-]*)?\)", _other_page, text)
    return re.sub(r"\[([^\]]*)\]\((?!\w+://)[^)]*\)", r"\1", text)


def _other_page(link: re.Match[str]) -> str:
    return f"{link[1]} (`longspan explain {link[2]}`)" if link[2] in _pages() else link[1]


def _title(path: Path) -> str:
    return path.read_text().partition("\n")[0].removeprefix("# ")


def _pages() -> dict[str, Path]:
    return {path.stem: path for path in sorted((folder() / "explanation").glob("*.md"))}


def _errors() -> str:
    return (folder() / "reference" / "errors.md").read_text()
