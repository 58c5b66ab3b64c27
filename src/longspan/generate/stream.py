"""What a user sees while text is generated: the text as it comes, and before it how far the prompt is."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import nn

EVERY_S = 5.0
"""Seconds between lines of progress where there is no terminal, which rewrites one line."""


class Decoder:
    """Token ids to text, as they come: what a token adds may depend on those before it, and a character may take
    several tokens.

    Args:
        tokenizer: the Hugging Face tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._ids = tokenizer, list[int]()
        self._start = self._shown = 0

    def add(self, ids: Sequence[int]) -> str:
        """The text that these ids add to what was given out; "" while a character is not whole."""
        self._ids += ids
        before, now = self._text(self._start, self._shown), self._text(self._start, len(self._ids))
        if now.endswith("\ufffd") or len(now) <= len(before):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return now[len(before) :]

    def end(self) -> str:
        """What is left, whole or not."""
        before, now = self._text(self._start, self._shown), self._text(self._start, len(self._ids))
        self._start = self._shown = len(self._ids)
        return now[len(before) :]

    def _text(self, start: int, end: int) -> str:
        text: str = self._tokenizer.decode(
            self._ids[start:end], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class TextStream:
    """A streamer for `generate`: counts tokens, and on the first rank writes their text as it comes.

    Args:
        tokenizer: the Hugging Face tokenizer, on the rank that writes; None on the others.
        shown: where the text goes; None: nowhere.
        out: a file that it goes to as well, anew.

    Attributes:
        ids: of the new tokens.
        times: when the first and the last of them came, in seconds of `time.perf_counter`.
        text: of all of them, on the rank that writes.
    """

    def __init__(self, tokenizer: Any | None, shown: TextIO | None, out: Path | None) -> None:
        self.ids, self.text, self.times = list[int](), "", list[float]()
        self.before: Any = None  # called once, before the first text
        self._decoder = None if tokenizer is None else Decoder(tokenizer)
        self._shown, self._prompt = shown, True
        self._file = None
        if out is not None and tokenizer is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            self._file = out.open("w", encoding="utf-8", newline="")

    def put(self, value: Any) -> None:
        """The ids of the prompt, and then those of each new token."""
        if self._prompt:
            self._prompt = False
            return
        ids = value.flatten().tolist()
        self.ids += ids
        self.times = [*self.times[:1], time.perf_counter()]
        if self._decoder is not None:
            self._write(self._decoder.add(ids))

    def end(self) -> None:
        """No more tokens come."""

    def close(self) -> None:
        """Write what is left, and close the file."""
        if self._decoder is not None:
            self._write(self._decoder.end())
            if self._shown is not None and self.text and not self.text.endswith("\n"):
                self._shown.write("\n")
                self._shown.flush()
        if self._file is not None:
            self._file.close()

    def _write(self, text: str) -> None:
        self.text += text
        if self.before is not None:
            self.before()
            self.before = None
        for stream in (self._file, self._shown):
            if stream is not None and text:
                stream.write(text)
                stream.flush()


class Progress:
    """How far a prompt is, on stderr: a line that is rewritten on a terminal, else one every few seconds.

    Args:
        tokens: of the prompt.
        shown: whether this rank says it.
    """

    def __init__(self, tokens: int, shown: bool) -> None:
        self._tokens, self._shown = tokens, shown
        self._start = self._said = time.perf_counter()
        self._live = shown and sys.stderr.isatty()
        self._read = 0
        self._hooks: list[Any] = []

    def follow(self, layers: Sequence[nn.Module], chunk: int) -> None:
        """Also show progress within a forward, layer by layer: the first chunk of a long prompt takes minutes.

        Args:
            layers: the model's layers, in order.
            chunk: tokens of the prompt per forward.
        """

        def after(number: int) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                tokens = min(chunk, self._tokens - self._read)
                self._show(self._read + tokens * number // (len(layers) + 1))

            return hook

        if self._shown:
            self._hooks = [layer.register_forward_hook(after(i)) for i, layer in enumerate(layers, 1)]

    def at(self, done: int) -> None:
        """So many tokens of the prompt are in the cache."""
        self._read = done
        self._show(done)

    def _show(self, done: int) -> None:
        now = time.perf_counter()
        if not self._shown or (not self._live and (now - self._said < EVERY_S or done >= self._tokens)):
            return
        self._said = now
        line = progress_line(done, self._tokens, now - self._start)
        sys.stderr.write(f"\r\x1b[2K{line}" if self._live else f"{line}\n")
        sys.stderr.flush()

    def clear(self) -> None:
        """Remove the line, and show no more progress."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._live:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
            self._live = self._shown = False


def progress_line(done: int, tokens: int, seconds: float) -> str:
    """How far, how fast, and how long the rest takes at the speed so far."""
    rate = max(done, 1) / max(seconds, 1e-9)
    share = f"reading {100 * done // tokens} %"
    return f"{share}: {done:,} of {tokens:,} tokens, {rate:,.0f} tokens/s, {(tokens - done) / rate:,.0f} s left"
