"""Output during generation: progress of the prompt, then the text as it is generated."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from tqdm import tqdm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import nn

EVERY_S = 5.0
"""Seconds between lines of progress without a terminal."""


class Decoder:
    """Decode tokens one by one: a token's text may depend on those before it, and a character may take several."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._ids = tokenizer, list[int]()
        self._start = self._decoded = 0

    def add(self, ids: Sequence[int]) -> str:
        """Return the text that these ids add; "" while a character is incomplete."""
        self._ids += ids
        before, now = self._text(self._start, self._decoded), self._text(self._start, len(self._ids))
        if now.endswith("\ufffd") or len(now) <= len(before):
            return ""
        self._start, self._decoded = self._decoded, len(self._ids)
        return now[len(before) :]

    def end(self) -> str:
        """Return the remaining text, even an incomplete character."""
        before, now = self._text(self._start, self._decoded), self._text(self._start, len(self._ids))
        self._start = self._decoded = len(self._ids)
        return now[len(before) :]

    def _text(self, start: int, end: int) -> str:
        text: str = self._tokenizer.decode(
            self._ids[start:end], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class TextStream:
    """A streamer for `generate`: counts tokens and, on the rank that has a tokenizer, writes their text.

    `ids` and `text` are those of the new tokens, `times` those of the first and the last one.
    """

    def __init__(self, tokenizer: Any | None, output: TextIO | None, out: Path | None) -> None:
        self.ids, self.text, self.times = list[int](), "", list[float]()
        self.before: Any = None  # called once, before the first text
        self._decoder = None if tokenizer is None else Decoder(tokenizer)
        self._output, self._prompt = output, True
        self._file = None
        if out is not None and tokenizer is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            self._file = out.open("w", encoding="utf-8", newline="")

    def put(self, value: Any) -> None:
        """Take the ids of the prompt, then those of each new token."""
        if self._prompt:
            self._prompt = False
            return
        ids = value.flatten().tolist()
        self.ids += ids
        self.times = [*self.times[:1], time.perf_counter()]
        if self._decoder is not None:
            self._write(self._decoder.add(ids))

    def end(self) -> None:
        """Do nothing: `close` ends the stream."""

    def close(self) -> None:
        """Write what remains, and a line's end to the output. A second call does nothing."""
        if self._decoder is not None:
            self._write(self._decoder.end())
            if self._output is not None and self.text and not self.text.endswith("\n"):
                self._output.write("\n")
                self._output.flush()
            self._output = None
        if self._file is not None:
            self._file.close()

    def _write(self, text: str) -> None:
        self.text += text
        if self.before is not None:
            self.before()
            self.before = None
        for stream in (self._file, self._output):
            if stream is not None and text:
                stream.write(text)
                stream.flush()


class _Lines:
    """Writes each state of a bar as a line to stderr, which is no terminal."""

    def write(self, text: str) -> None:
        if text.strip():
            sys.stderr.write(f"{text.strip()}\n")

    def flush(self) -> None:
        sys.stderr.flush()


class Progress:
    """Progress of a prompt's tokens on stderr: a bar on a terminal, else a line every few seconds."""

    def __init__(self, tokens: int, enabled: bool) -> None:
        wait_s, file = (0.1, sys.stderr) if sys.stderr.isatty() else (EVERY_S, _Lines())
        self._bar: Any = tqdm(
            total=tokens, desc="reading", unit=" tokens", leave=False, disable=not enabled, delay=wait_s,
            mininterval=wait_s, miniters=1, file=file,
        )  # fmt: skip
        self._tokens, self._read = tokens, 0
        self._hooks: list[Any] = []

    def follow(self, layers: Sequence[nn.Module], chunk: int) -> None:
        """Also show progress after each layer of a forward of `chunk` tokens: it may take minutes."""

        def after(number: int) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                tokens = min(chunk, self._tokens - self._read)
                self._show(self._read + tokens * number // (len(layers) + 1))

            return hook

        if not self._bar.disable:
            self._hooks = [layer.register_forward_hook(after(i)) for i, layer in enumerate(layers, 1)]

    def at(self, done: int) -> None:
        """Report that `done` tokens of the prompt are in the cache."""
        self._read = done
        self._show(done)

    def _show(self, done: int) -> None:
        self._bar.update(done - self._bar.n)

    def clear(self) -> None:
        """Remove the bar and show no more progress."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._bar.close()
