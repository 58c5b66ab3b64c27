"""The help of a command: its fields' docstrings, and the options of other tools."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import shutil
import textwrap
import typing
from typing import Annotated, Any

from longspan.core.sections import is_section, shown

_OTHER_NAMES = {
    "model": "model_name_or_path model_name model_path model_id base_model pretrained",
    "tokenizer": "tokenizer_name tokenizer_path",
    "text-field": "dataset_text_field text_column text_key",
    "context": "max_seq_length max_seq_len max_length sequence_len sequence_length seq_length seq_len cutoff_len "
    "model_max_length block_size context_length",
    "lora": "lora_r lora_rank use_peft adapter",
    "quantize": "load_in_4bit quantization_bit quantization qlora bnb nf4",
    "lora-targets": "lora_target_modules lora_target",
    "freeze": "freeze_modules unfrozen_parameters",
    "dtype": "bf16 fp16 torch_dtype precision mixed_precision",
    "grad-checkpointing": "gradient_checkpointing activation_checkpointing",
    "kernel": "attn_implementation flash_attention attention",
    "ulysses": "context_parallel_size context_parallel_degree cp_size cp sequence_parallel_size "
    "sequence_parallel_degree sp_size sp",
    "ring": "ring_size ring_degree",
    "tensor": "tensor_parallel_size tensor_parallel_degree tp_size tp",
    "data": "data_parallel_size dp_size dp replicas",
    "gpus": "num_gpus n_gpus",
    "nproc": "nproc_per_node num_processes world_size num_gpus n_gpus",
    "out": "output_dir output save_dir",
    "max-new-tokens": "max_tokens max_length n_predict",
    "prompt": "text input",
    "file": "input_file prompt_file",
    "cache-offload": "offload_kv_cache",
}
"""The names of each option in other tools (transformers, TRL, axolotl, torchtitan, vLLM)."""


def suggest_option(name: str, known: list[str], prog: str, prefix: str = "") -> str:
    """Return a hint for an option that does not exist: the closest one.

    Args:
        name: the name that was written, with hyphens.
        known: all options of the command.
        prog: the command.
        prefix: put before the option in the hint ("--"; none in a file).
    """
    names = {word.replace("_", "-"): flag for flag in known for word in _OTHER_NAMES.get(flag, "").split()}
    names |= {flag: flag for flag in known}
    name = name.removeprefix("no-")
    close = [name] if name in names else difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    if not close:
        return f"{prog} --help lists all"
    return f"did you mean {prefix}{names[close[0]]}?" if prefix else f"did you mean {names[close[0]]!r}?"


def description(config_class: type[Any], summary: str) -> str:
    """Return a command's description, wrapped to the terminal; tyro wraps its own boxes only.

    tyro joins lines unless the second begins with a space, so all but the summary are indented.
    """
    _, _, text = inspect.cleandoc(config_class.__doc__ or "").partition("\n\n")
    lines = textwrap.wrap(text, shutil.get_terminal_size().columns, initial_indent="  ", subsequent_indent="  ")
    return "\n".join([f"{summary[0].upper()}{summary[1:]}.", *lines])


def documented(config_class: type[Any]) -> Any:
    """Return tyro's rule for a config of sections: their flags have no prefix, and only those that `shown` names."""
    import tyro

    constructors = tyro.constructors
    kinds = typing.get_type_hints(config_class, include_extras=True)
    sections = {
        kinds[field.name]: shown(field, kinds[field.name])
        for field in dataclasses.fields(config_class)
        if is_section(kinds[field.name])
    }

    def rule(info: Any) -> Any:
        if info.type is not config_class and info.type not in sections:
            return None
        texts = field_texts(info.type)
        kinds = typing.get_type_hints(info.type, include_extras=True)
        specs = []
        for field in sections.get(info.type, dataclasses.fields(config_class)):
            kind = kinds[field.name]
            if is_section(kind):  # the fields' flags have no prefix
                kind = Annotated[kind, tyro.conf.OmitArgPrefixes]
            default = getattr(info.default, field.name)
            if default in (None, "", ()):  # the text says what happens then
                kind = Annotated[kind, tyro.conf.arg(help_behavior_hint="")]
            specs.append(constructors.StructFieldSpec(field.name, kind, default, texts.get(field.name)))
        instantiate = functools.partial(dataclasses.replace, info.default) if info.type in sections else info.type
        return constructors.StructConstructorSpec(instantiate=instantiate, fields=tuple(specs))

    return rule


def field_texts(config_class: type[Any]) -> dict[str, str]:
    """Return the docstring of every field, as one line."""
    texts: dict[str, str] = {}
    for cls in reversed(config_class.__mro__):
        if not dataclasses.is_dataclass(cls):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, after in zip(body.body, body.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                text = after.value if isinstance(after, ast.Expr) else None
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    texts[statement.target.id] = " ".join(text.value.split())
    return texts
