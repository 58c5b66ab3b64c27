"""Documents as token ids: texts, chats, prompts with completions, rows of ids and preferences.

An id without a loss is stored as its complement, `~id`, which is below 0. So ids and labels are packed, shared and cut
as one array. Of a preference it contains the prompt with the chosen answer, then the prompt with the rejected one.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from longspan.core.errors import LongspanError
from longspan.core.validation import format_value
from longspan.data.rows import Kind
from longspan.hf.pretrained import first_line
from longspan.hf.prompts import read_image

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    Ids = NDArray[np.int64]
    Span = tuple[int, int]

LossOn = Literal["assistant", "last", "all"]
"""Which tokens of a chat have a loss: all turns of the assistant, the last of them, or every token."""

_ROLES = ("system", "developer", "user", "assistant", "tool")
_IGNORED = -100  # Hugging Face's label without a loss
_MEDIA = ("image", "image_url", "video", "audio", "input_audio")
_MARKED = (
    "{% for text, trained in parts %}{% if trained %}{% generation %}{{ text }}{% endgeneration %}{% else %}{{ text }}"
    "{% endif %}{% endfor %}"
)
"""A template of a text that is written already, with marks on what is trained."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Tokenizer:
    """Documents to ids: texts, chats by the tokenizer's template, prompts with completions, ids as they are."""

    tokenizer: Any  # Hugging Face's
    loss_on: LossOn = "assistant"
    vocabulary: int | None = None  # ids that the model knows; None does not check
    processor: Any = None  # of a vision-language model, for chats with images; it has the same tokenizer
    placeholders: tuple[int, ...] = ()  # ids of tokens whose embeddings come from images

    def text_ids(self, text: str, *, first: bool = True, last: bool = False) -> Ids:
        """Return the ids of a piece of a text: of the `first` with the begin token, if the tokenizer adds one itself,
        of the `last` with the end token.
        """
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if first and self._adds_begin:
            ids = [self.tokenizer.bos_token_id, *ids]
        if last:
            ids = [*ids, self.tokenizer.eos_token_id]
        return np.asarray(ids, dtype=np.int64)

    @functools.cached_property
    def _adds_begin(self) -> bool:
        begin = self.tokenizer.bos_token_id
        return begin is not None and self.tokenizer("a")["input_ids"][:1] == [begin]

    def ids(self, text: str, kind: Kind, where: str) -> Ids:
        """Return the ids of a row (`longspan.data.rows.Document`), `~id` where a token has no loss."""
        row = json.loads(text)
        if kind == "images":
            ids, spans, _ = self._images(row, where)
        else:
            encode = {
                "chat": self._chat, "completion": self._completion, "ids": self._given, "preference": self._preference
            }[kind]  # fmt: skip
            ids, spans = encode(row, where)
        if self.loss_on == "all" and kind not in ("ids", "images", "preference"):
            return ids
        marked = ~ids
        for start, end in spans:
            marked[start:end] = ids[start:end]
        if not (marked[1:] >= 0).any():
            raise LongspanError(f"{where} has no token with a loss: every label is masked", code="LS502")
        return marked

    # --- chats with images

    def pictures(self, text: str, where: str, ids: Ids) -> dict[str, Tensor]:
        """Return what the processor makes of a row's images; `ids` are the row's, made with the same images."""
        again, _, tensors = self._images(json.loads(text), where)
        if not np.array_equal(again, ids):
            raise LongspanError(
                f"{where}: an image has changed its size since the row was tokenised; keep the files", code="LS505"
            )
        return tensors

    def _images(self, row: dict[str, Any], where: str) -> tuple[Ids, list[Span], dict[str, Tensor]]:
        """Return ids, spans with a loss, and the processor's other tensors. The turns with a loss are found in the
        text as those of other chats; then the processor replaces each image in it by placeholders.
        """
        if self.processor is None:
            raise LongspanError(
                f"{where} has images, and the data to train on has none; give --format images for both", code="LS505"
            )
        before, spans = self._chat(row, where)
        images = [read_image(reference, f"{where}: the image") for reference in row["images"]]
        text = self._renderer(row, where)(row["messages"])
        offsets = self._encoded(text)[1]
        if self.loss_on == "all":
            spans = [(0, len(before))]
        borders = [0, *(offsets[i][side] for a, b in spans for i, side in ((a, 0), (b - 1, 1))), len(text)]
        parts = [(text[a:b], bool(i % 2)) for i, (a, b) in enumerate(itertools.pairwise(borders)) if a < b]
        try:
            out = self.processor.apply_chat_template(
                [{"role": "user", "content": []}], chat_template=_MARKED, parts=parts, tokenize=True, return_dict=True,
                return_assistant_tokens_mask=True, return_tensors="pt",
                processor_kwargs={"images": images or None, "add_special_tokens": False, "return_tensors": "pt"},
            )  # fmt: skip
        except Exception as error:  # processors raise any kind
            raise LongspanError(
                f"{where}: the model's processor refuses it: {first_line(error)}", code="LS505"
            ) from error
        ids = out["input_ids"][0].numpy()
        mask = np.asarray(out["assistant_masks"])[0].astype(bool)
        shown = np.isin(ids, self.placeholders)
        if bool(shown.any()) != bool(images):
            raise LongspanError(
                f"{where} has {len(images)} images, and {int(shown.sum())} placeholders for them after the chat "
                "template and the processor; give a template that writes images by --chat-template, and no "
                "placeholders in texts",
                code="LS505",
            )
        if self.loss_on != "all" and not np.array_equal(ids[mask], np.concatenate([before[a:b] for a, b in spans])):
            raise LongspanError(
                f"{where}: the model's processor ({type(self.processor).__name__}) does not tell which tokens are the "
                "assistant's beside images; use --loss-on all, or another version of transformers",
                code="LS505",
            )
        others = {key: x for key, x in out.items() if key not in ("input_ids", "assistant_masks", "attention_mask")}
        return ids, _runs(mask & ~shown), others

    # --- chats

    def _chat(self, row: dict[str, Any], where: str) -> tuple[Ids, list[Span]]:
        messages = check_messages(row["messages"], where, self._template, images="images" in row)
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        render = self._renderer(row, where)
        if self.loss_on == "all":
            return self._encoded(render(messages))[0], []
        if not turns:
            raise LongspanError(
                f"{where} has no turn of the assistant, so nothing to learn; remove the row, or give --loss-on all",
                code="LS502",
            )
        if self.loss_on == "last":
            turns = turns[-1:]
        elif _GENERATION.search(self._template) and self.tokenizer.is_fast:
            return self._by_generation_mask(render, messages)
        text = render(messages)
        borders = []
        for turn in turns:
            if turn == 0:
                raise LongspanError(
                    f"{where} begins with a turn of the assistant: only a chat template with {{% generation %}} says "
                    "where it starts; remove the turn, or give such a template by --chat-template",
                    code="LS502",
                )
            before = render(messages[:turn], add_generation_prompt=True)
            after = render(messages[: turn + 1])
            for prefix in (before, after):
                _check_prefix(prefix, text, turn, where)
            borders.append((len(before), len(after)))
        return self._with_spans(text, borders, where)

    def _by_generation_mask(self, render: Callable[..., Any], messages: Any) -> tuple[Ids, list[Span]]:
        out = render(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        mask = np.asarray(out["assistant_masks"], dtype=np.int8)
        return np.asarray(out["input_ids"], dtype=np.int64), _runs(mask)

    @property
    def _template(self) -> str:
        template = self.tokenizer.chat_template
        if isinstance(template, dict):  # some tokenizers have several; transformers takes this one
            template = template.get("default")
        if not template:
            raise LongspanError(
                "the tokenizer has no chat template, which chats need; give one with --chat-template FILE.jinja, or "
                "--tokenizer of an instruction-tuned model",
                code="LS503",
            )
        return str(template)

    def _renderer(self, row: dict[str, Any], where: str) -> Callable[..., Any]:
        tools, options = row.get("tools"), row.get("chat_template_kwargs") or {}
        if isinstance(tools, str):
            try:
                tools = json.loads(tools)
            except ValueError as error:
                raise LongspanError(
                    f"{where} has `tools` that are no JSON: {first_line(error)}", code="LS502"
                ) from error

        def render(messages: Any, **more: Any) -> Any:
            import jinja2

            try:
                return self.tokenizer.apply_chat_template(
                    messages, tools=tools or None, **{"tokenize": False, **options, **more}
                )
            except jinja2.TemplateSyntaxError as error:
                raise LongspanError(
                    f"the chat template is no valid Jinja, at its line {error.lineno}: {first_line(error)}; correct "
                    "it, or give another with --chat-template",
                    code="LS503",
                ) from error
            except Exception as error:  # of a template, which may raise anything
                raise LongspanError(
                    f"{where}: the chat template refuses it: {first_line(error)}", code="LS502"
                ) from error

        return render

    # --- prompts with completions

    def _completion(self, row: dict[str, Any], where: str, column: str = "completion") -> tuple[Ids, list[Span]]:
        prompt, completion = row.get("prompt"), row.get(column)
        if isinstance(prompt, list) and isinstance(completion, list):
            check_messages(prompt, where, self._template, "prompt")
            check_messages(completion, where, self._template, column)
            render = self._renderer(row, where)
            text, before = render(prompt + completion), render(prompt, add_generation_prompt=True)
            _check_prefix(before, text, len(prompt), where)
            return self._with_spans(text, [(len(before), len(text))], where)
        if not (isinstance(prompt, str) and isinstance(completion, str)) or not completion:
            raise LongspanError(
                f"{where} needs a `prompt` and a `{column}`, both texts or both lists of messages; it has "
                f"{type(prompt).__name__} and {type(completion).__name__ if completion else f'an empty {column}'}",
                code="LS502",
            )
        return self._texts(prompt, completion)

    def _texts(self, prompt: str, completion: str) -> tuple[Ids, list[Span]]:
        """Return the ids of two texts. The prompt's are those that the model will be given."""
        before: list[int] = self.tokenizer(prompt, verbose=False)["input_ids"] if prompt else []
        end = self.tokenizer.eos_token_id
        if before and before[-1] == end:  # a tokenizer that ends every text
            before = before[:-1]
        ids: list[int] = self.tokenizer(prompt + completion, verbose=False)["input_ids"]
        if ids[: len(before)] != before:  # a token reaches over the border: it is split there
            ids = before + self.tokenizer(completion, add_special_tokens=False, verbose=False)["input_ids"]
        if ids[-1] != end:
            ids = [*ids, end]
        return np.asarray(ids, dtype=np.int64), [(len(before), len(ids))]

    # --- preferences

    def _preference(self, row: dict[str, Any], where: str) -> tuple[Ids, list[Span]]:
        """Return the ids of the two answers, each after the prompt, which by default is what both begin with."""
        if row.get("chosen") == row.get("rejected"):
            raise LongspanError(
                f"{where}: `chosen` and `rejected` are the same, so neither is preferred; remove the row", code="LS502"
            )
        if not isinstance(row.get("prompt"), type(row.get("chosen"))):  # none, or a text next to whole chats
            row = {**row, **common_prompt(row.get("chosen"), row.get("rejected"), where)}
        ids: list[Ids] = []
        spans: list[Span] = []
        for column in ("chosen", "rejected"):
            answer, ((start, end),) = self._completion(row, where, column)
            if end <= (start := max(1, start)):  # no token predicts the first one
                raise LongspanError(f"{where}: `{column}` has no token after the prompt; remove the row", code="LS502")
            before = sum(map(len, ids))
            ids, spans = [*ids, answer], [*spans, (before + start, before + end)]
        return np.concatenate(ids), spans

    # --- ids

    def _given(self, row: dict[str, Any], where: str) -> tuple[Ids, list[Span]]:
        ids, labels = row.get("input_ids"), row.get("labels")
        for name, values in (("input_ids", ids), ("labels", ids if labels is None else labels)):
            if not isinstance(values, list) or not values or not all(type(value) is int for value in values):
                raise LongspanError(
                    f"{where}: `{name}` must be a list of whole numbers, got {format_value(values)}", code="LS501"
                )
        array = np.asarray(ids, dtype=np.int64)
        if array.min() < 0 or (self.vocabulary is not None and array.max() >= self.vocabulary):
            raise LongspanError(
                f"{where}: `input_ids` has the ids {array.min()} to {array.max()}; the model's vocabulary has 0 to "
                f"{(self.vocabulary or 0) - 1}: tokenise the rows with the model's own tokenizer",
                code="LS501",
            )
        if labels is None:
            return array, [(0, len(array))]
        given = np.asarray(labels, dtype=np.int64)
        if given.shape != array.shape:
            raise LongspanError(
                f"{where} has {len(array)} `input_ids` and {len(given)} `labels`; they need one each", code="LS501"
            )
        trained = given != _IGNORED
        if wrong := np.flatnonzero(trained & (given != array)).tolist():
            raise LongspanError(
                f"{where}: label {wrong[0]} is {given[wrong[0]]}, and the id there {array[wrong[0]]}; a label is the "
                f"id at its place (not shifted), or {_IGNORED} for no loss",
                code="LS501",
            )
        return array, _runs(trained)

    # --- characters to tokens

    def _encoded(self, text: str) -> tuple[Ids, list[Span]]:
        """Return the ids of a rendered chat and, of a fast tokenizer, the characters of each."""
        fast = self.tokenizer.is_fast
        out = self.tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=fast)
        return np.asarray(out["input_ids"], dtype=np.int64), out["offset_mapping"] if fast else []

    def _with_spans(self, text: str, borders: list[Span], where: str) -> tuple[Ids, list[Span]]:
        """Return the ids of a text, and its spans of characters as spans of tokens, whose borders must be tokens'."""
        ids, offsets = self._encoded(text)
        starts = [start for start, _ in offsets]

        def token_at(character: int) -> int:
            if self.tokenizer.is_fast:
                index = bisect.bisect_left(starts, character)
                aligned = index == 0 or offsets[index - 1][1] <= character
            else:
                before = self._encoded(text[:character])[0]
                index, aligned = len(before), np.array_equal(before, ids[: len(before)])
            if not aligned:
                around = text[max(0, character - 12) : character + 12]
                raise LongspanError(
                    f"{where}: a token reaches over the border of a turn, at {around!r}; give a chat template with "
                    "{% generation %} by --chat-template",
                    code="LS502",
                )
            return index

        return ids, [(token_at(start), token_at(end)) for start, end in borders]


def common_prompt(chosen: Any, rejected: Any, where: str) -> dict[str, Any]:
    """Return prompt and answers of two texts or chats that begin alike, as TRL's `extract_prompt` does."""
    if not (isinstance(chosen, str | list) and type(chosen) is type(rejected) and chosen and rejected):
        return {}
    last = min(len(chosen), len(rejected)) - 1
    n = next((i for i in range(last) if chosen[i] != rejected[i]), last)
    if n and chosen[n] != rejected[n] and chosen[n - 1] == " ":  # the space belongs to the answers
        n -= 1
    if n == 0 and isinstance(chosen, list):
        raise LongspanError(
            f"{where} has no `prompt` of messages, and `chosen` and `rejected` begin with different ones; give a "
            "prompt",
            code="LS502",
        )
    return {"prompt": chosen[:n], "chosen": chosen[n:], "rejected": rejected[n:]}


def answers_of(ids: Ids) -> list[Ids]:
    """Return the two answers of a preference, each with its prompt: a token with a loss ends the first one."""
    border = int(np.flatnonzero((ids[:-1] >= 0) & (ids[1:] < 0))[0]) + 1
    return [ids[:border], ids[border:]]


def _runs(mask: NDArray[Any]) -> list[Span]:
    """Return the runs of ones in a mask."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    return [(int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def _check_prefix(prefix: str, text: str, turn: int, where: str) -> None:
    if not text.startswith(prefix):
        raise LongspanError(
            f"{where}: what the chat template writes up to message {turn + 1} is no beginning of the whole chat (some "
            "remove earlier reasoning), so the assistant's tokens cannot be told apart; give a template with "
            "{% generation %} by --chat-template, or train on the last turn alone by --loss-on last",
            code="LS502",
        )


def check_messages(
    messages: Any, where: str, template: str, column: str = "messages", *, images: bool = False
) -> list[dict[str, Any]]:
    """Return a chat's messages if they are well-formed, their roles are known, and they have no media but `images`.

    A role is known if it is one of the usual ones, or if the template names it.
    """
    if not isinstance(messages, list) or not messages:
        raise LongspanError(
            f"{where}: `{column}` must be a list of messages, got {format_value(messages)}", code="LS502"
        )
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            has = ", ".join(map(repr, message)) if isinstance(message, dict) else format_value(message)
            raise LongspanError(
                f"{where}: message {number} of `{column}` needs `role` and `content`; it has {has}", code="LS502"
            )
        role, content = message["role"], message.get("content")
        if role not in _ROLES and not re.search(rf"""["']{re.escape(role)}["']""", template):
            raise LongspanError(
                f"{where}: message {number} has the unknown role {role!r}; use {', '.join(_ROLES)}, or a role that the "
                "chat template names",
                code="LS502",
            )
        if not isinstance(content, str | list | None):
            raise LongspanError(
                f"{where}: the content of message {number} is {type(content).__name__}, not text", code="LS502"
            )
        for part in content if isinstance(content, list) else ():
            media = part.get("type") if isinstance(part, dict) else None
            if media in _MEDIA and not (images and media == "image"):
                hint = (
                    "images are read with --format images"
                    if media == "image"
                    else "`train` reads text, and images as content parts of the type image. Train on others with "
                    "`longspan.parallelize` in a script"
                )
                raise LongspanError(f"{where}: message {number} holds {media}; {hint}", code="LS505")
    return messages
