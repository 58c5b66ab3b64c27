"""The datasets of a run, in the columns that TRL's trainers read: from the hub or from files, mixed by weight.

Files are read by `datasets`, which stores them as Arrow files that all ranks of a machine share.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl.scripts.utils import DatasetConfig

from longspan.core.errors import LongspanError
from longspan.core.validation import format_value
from longspan.hf.model.pretrained import first_line
from longspan.hf.model.prompts import PYDOC, naming, open_dataset
from longspan.train import METHODS
from longspan.train.arguments import Arguments

_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
"""ShareGPT's names of roles, where they differ."""
_OF_ONE = {
    "dataset_config": "`name` in its entry",
    "dataset_train_split": "`split` in its entry",
    "dataset_test_split": "`eval_datasets`, or `test_split_size`",
    "dataset_streaming": "`streaming`",
}
_OF_MIXTURES = {"streaming": "`dataset_streaming`"}
"""Keys that one of `dataset_name` and `datasets` alone reads, and what to give with the other one."""
_EXTRA = ("tools", "chat_template_kwargs", "image", "images")
_ALPACA = ("instruction", "output")


@dataclass(frozen=True)
class Source:
    """A dataset of a mixture."""

    name: str  # for messages
    dataset: Any
    newest: deque[tuple[int, Any]] | None = None  # of a stream: its newest rows, with their numbers


@dataclass(frozen=True)
class Data:
    """What a run trains on and evaluates, and the sources that it was mixed from."""

    train: Any
    evaluated: Any  # a dataset, several by name, or None
    sources: tuple[Source, ...]


def open_data(arguments: Arguments, template: bool) -> Data:
    """Return the datasets of a run; `template`: the tokenizer has a chat template.

    Raises:
        LongspanError: for what cannot be found or read, and columns that TRL would not train on, or not as meant.
    """
    script, mixture, training = arguments.script, arguments.mixture, arguments.training
    if bool(mixture.datasets) == bool(script.dataset_name):
        found = "both" if script.dataset_name else "neither"
        raise LongspanError(
            f"train needs either `dataset_name` (a file, a folder, a dataset's name, or {PYDOC} for a first try) or "
            f"`datasets`, a list of these with their `path`; got {found}"
        )
    ignored = _OF_ONE if mixture.datasets else _OF_MIXTURES
    if without_effect := sorted(arguments.given & set(ignored)):
        key = "datasets" if mixture.datasets else "dataset_name"
        first = without_effect[0]
        raise LongspanError(f"{first}: it has no effect with `{key}`; give {ignored[first]}")
    if arguments.ours.eval_datasets and mixture.test_split_size is not None:
        raise LongspanError("test_split_size: it holds rows out that `eval_datasets` would replace; give one of them")
    configs = mixture.datasets or [
        DatasetConfig(str(script.dataset_name), script.dataset_config, split=script.dataset_train_split)
    ]
    streaming = mixture.streaming if mixture.datasets else script.dataset_streaming
    sources = [_source(arguments, config, streaming, template) for config in configs]
    kinds = {tuple(sorted(s.dataset.column_names or ())): s.name for s in sources}
    if len(kinds) > 1:
        listed = "; ".join(f"{name} has {', '.join(columns)}" for columns, name in kinds.items())
        raise LongspanError(f"the datasets of a mixture need the same columns, and {listed}; convert some of them")
    train: Any = _mixed(sources, [config.fraction for config in configs], streaming, training.seed)
    evaluated: Any = None
    if mixture.test_split_size is not None:
        if streaming:
            raise LongspanError(
                "test_split_size: a stream cannot be split; give `eval_datasets`, or `streaming: false`"
            )
        try:
            split = train.train_test_split(test_size=mixture.test_split_size, seed=training.seed)  # equal on every rank
        except ValueError as error:
            raise LongspanError(f"test_split_size: {first_line(error)}") from error
        train, evaluated = split["train"], split["test"]
    if arguments.ours.eval_datasets:
        evaluated = {}
        entries: list[Any] = arguments.ours.eval_datasets  # texts, or mappings from the file
        for entry in entries:
            try:
                config = DatasetConfig(**entry) if isinstance(entry, dict) else DatasetConfig(entry)
            except TypeError as error:
                raise LongspanError(f"eval_datasets: {format_value(entry)}: {first_line(error)}") from error
            if config.fraction is not None:
                raise LongspanError("eval_datasets: `fraction` is a share of a mixture to train on; leave it out")
            name = config.name or Path(config.path).stem
            if Path(config.path).exists():  # its name is that of its loss alone
                config = dataclasses.replace(config, name=None)
            if name in evaluated:
                raise LongspanError(f"eval_datasets: two of them are called {name}; rename one, or leave it out")
            evaluated[name] = _source(arguments, config, False, template).dataset
    elif evaluated is None and training.eval_strategy != "no":
        if not script.dataset_name:
            raise LongspanError("eval_strategy needs data: give `eval_datasets`, or `test_split_size`")
        config = dataclasses.replace(configs[0], split=script.dataset_test_split)
        evaluated = _source(arguments, config, False, template).dataset
    return Data(train, evaluated, tuple(sources))


def _mixed(sources: list[Source], fractions: list[float | None], streaming: bool, seed: int) -> Any:
    """Return the sources in one dataset; with fractions each has its share, and none is repeated, as in TRL."""
    import datasets

    if None in fractions and any(fractions):
        raise LongspanError("`fraction` is a share of the mixture; give every dataset one, or none")
    parts = [source.dataset for source in sources]
    if len(parts) == 1:
        return parts[0]
    if None in fractions:
        return datasets.concatenate_datasets(parts)
    for source, fraction in zip(sources, fractions, strict=True):
        if fraction is None or not fraction > 0:
            raise LongspanError(f"`fraction` of {source.name} is {fraction}; it must be more than 0")
    shares = [fraction / sum(fractions) for fraction in fractions]  # type: ignore[operator,arg-type]
    if streaming:
        return datasets.interleave_datasets(parts, shares, seed=seed, stopping_strategy="all_exhausted")
    total = min(len(part) / share for part, share in zip(parts, shares, strict=True))
    counts = [round(share * total) for share in shares]
    for source, count in zip(sources, counts, strict=True):
        if not count:
            raise LongspanError(
                f"`fraction` gives {source.name} no row of its {len(source.dataset):,}; raise it, or leave it out"
            )
    return datasets.concatenate_datasets([part.select(range(n)) for part, n in zip(parts, counts, strict=True)])


def _source(arguments: Arguments, config: DatasetConfig, streaming: bool, template: bool) -> Source:
    """Return a dataset with the columns that the method needs."""
    name = config.path if config.data_files is None else f"{config.path} ({config.data_files})"
    with naming(name):
        dataset = open_dataset(
            config.path,
            config.name,
            split=config.split,
            data_dir=config.data_dir,
            data_files=config.data_files,
            streaming=streaming,
        )
        if config.columns is not None:
            dataset = dataset.select_columns(config.columns)
        text_field = getattr(arguments.training, "dataset_text_field", "text")
        dataset = shaped(dataset, arguments.method, text_field, template, name)
        return _remembering(name, dataset) if streaming else Source(name, dataset)


def _remembering(name: str, stream: Any) -> Source:
    """Return a stream that remembers its newest rows: a mixture reads a row of each source ahead."""
    newest: deque[tuple[int, Any]] = deque(maxlen=4)

    def remember(row: Any, at: int) -> Any:
        newest.append((at, row))
        return row

    return Source(name, stream.map(remember, with_indices=True, features=stream.features), newest)


# --- columns


def shaped(dataset: Any, method: str, text_field: str, template: bool, source: str) -> Any:
    """Return a dataset with the columns that TRL needs, and no others, which it might read instead.

    ShareGPT's and Alpaca's rows are converted: to `messages`, and to `prompt` and `completion`.
    """
    row = next(iter(dataset), None)
    if row is None:
        raise LongspanError(f"{source} has no rows; give other data", code="LS504")
    columns = list(row)
    extra = [name for name in columns if name in _EXTRA]
    needed = METHODS[method].columns
    if needed and needed != ("messages",):
        if not set(needed) <= set(columns):
            missing = " and ".join(f"`{name}`" for name in needed if name not in columns)
            raise LongspanError(
                f"{source} has no {missing}, which {method} needs; it has {', '.join(columns)}", code="LS501"
            )
        implicit = isinstance(row[needed[0]], list) and not isinstance(row.get("prompt", []), list)
        prompt = ["prompt"] * ("prompt" in columns and not implicit)  # else TRL takes the common beginning
        return dataset.select_columns([*dict.fromkeys((*prompt, *needed)), *extra])
    kinds: dict[str, tuple[str, ...]] = {
        "chats": ("messages",), "ShareGPT's chats": ("conversations",), "completions": ("prompt", "completion"),
        "token ids": ("input_ids",), "Alpaca's instructions": _ALPACA, "texts": (text_field,),
    }  # fmt: skip
    if needed:
        kinds = {kind: kinds[kind] for kind in ("chats", "ShareGPT's chats")}
    found = [kind for kind, needed in kinds.items() if set(needed) <= set(columns)]
    if len(found) != 1:
        readable = "; ".join(f"{kind}: {', '.join(kinds[kind])}" for kind in found or kinds)
        hint = "choose some by `datasets: [{path: ..., columns: [...]}]`" if found else "rename yours, or give "
        hint += "" if found else f"dataset_text_field, the name of a column of texts (now {text_field})"
        what = "the columns of more than one kind of rows" if found else f"the columns {', '.join(columns)}, and no"
        raise LongspanError(f"{source} has {what} ({readable}); {hint}", code="LS501")
    kept = [*kinds[found[0]], *extra]
    if found == ["token ids"]:
        kept += [name for name in ("labels", "seq_lengths") if name in columns]
    if found == ["Alpaca's instructions"]:
        made = dataset.map(_from_alpaca, with_indices=True, fn_kwargs={"source": source, "template": template})
        return made.select_columns(["prompt", "completion"])
    if found == ["ShareGPT's chats"] or (found == ["chats"] and _is_sharegpt(row["messages"])):
        removed = [name for name in columns if name not in extra and name != "messages"]
        options = {"source": source, "column": kept[0]}
        return dataset.map(_from_sharegpt, with_indices=True, fn_kwargs=options, remove_columns=removed)
    if found == ["texts"] and not isinstance(row[text_field], str):
        raise LongspanError(
            f"{source}: the column {text_field!r} holds {type(row[text_field]).__name__}, not text; name another by "
            "dataset_text_field",
            code="LS501",
        )
    if found == ["texts"] and not any(row[text_field] for row in itertools.islice(dataset, 100)):
        raise LongspanError(f"{source} has no text in its first rows; give other data", code="LS504")
    return dataset.select_columns(kept)


def _is_sharegpt(messages: Any) -> bool:
    return isinstance(messages, list) and bool(messages) and isinstance(messages[0], dict) and "from" in messages[0]


def _from_sharegpt(row: Mapping[str, Any], at: int, source: str, column: str) -> dict[str, Any]:
    messages = []
    for turn in row[column] or ():
        role, content = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        role = _ROLES.get(role, role)
        if role not in ("system", "user", "assistant", "tool") or not isinstance(content, str):
            raise LongspanError(
                f"{source}, row {at}: a turn of `{column}` has the role {role!r} and {type(content).__name__} as text; "
                "roles are human (user), gpt (assistant), system and tool",
                code="LS502",
            )
        messages.append({"role": role, "content": content})
    return {"messages": messages}


def _from_alpaca(row: Mapping[str, Any], at: int, source: str, template: bool) -> dict[str, Any]:
    question, answer = row["instruction"], row["output"]
    if not (isinstance(question, str) and isinstance(answer, str) and answer):
        raise LongspanError(
            f"{source}, row {at}: `instruction` and `output` must be texts, got {format_value(question)} and "
            f"{format_value(answer)}",
            code="LS502",
        )
    if row.get("input"):
        question = f"{question}\n\n{row['input']}"
    if not template:
        return {"prompt": f"{question}\n\n", "completion": answer}
    return {
        "prompt": [{"role": "user", "content": question}],
        "completion": [{"role": "assistant", "content": answer}],
    }


def find_row(data: Data, arguments: Arguments, tokenizer: Any) -> str | None:
    """Return source, row and reason of the first row that cannot be tokenised, or None. Used after an error.

    A stream may be endless: of its rows only the newest are tried.
    """
    only = getattr(arguments.training, "assistant_only_loss", False)
    field = getattr(arguments.training, "dataset_text_field", "text")

    def attempt(row: Mapping[str, Any]) -> None:
        for column, value in row.items():
            if column in ("messages", "prompt", "completion", "chosen", "rejected") and isinstance(value, list):
                if not value:
                    raise ValueError(f"`{column}` has no messages")
                options = row.get("chat_template_kwargs") or {}
                found = tokenizer.apply_chat_template(
                    value, tools=row.get("tools"), return_dict=True, return_assistant_tokens_mask=only, **options
                )
                if only and column == "messages" and 1 not in found["assistant_masks"]:
                    if "{% generation" not in re.sub(r"{%-\s*", "{% ", str(tokenizer.chat_template)):
                        raise ValueError(
                            "the chat template does not mark the assistant's tokens by {% generation %}; set "
                            "chat_template_path to one that does, or leave out assistant_only_loss"
                        )
                    raise ValueError("it has no token of the assistant, so nothing to learn")
            elif column in (field, "prompt", "completion", "chosen", "rejected") and not isinstance(value, str):
                raise ValueError(f"`{column}` is {type(value).__name__}, not text")

    for source in data.sources:
        for number, row in enumerate(source.dataset) if source.newest is None else source.newest:
            try:
                attempt(row)
            except Exception as error:  # templates raise any kind
                return f"{source.name}, row {number}: {first_line(error)}"
    return None
