"""Load a pretrained model and shard it while it is read: no rank's host ever holds all of its weights.

The model is made without memory for its weights, sharded, and then each rank reads its own rows. If transformers
converts weights as it reads them (merges experts, say), or if they are random, the first rank makes the full model and
sends every rank its rows, a parameter at a time.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from longspan.comm.agree import on_every_rank
from longspan.comm.arguments import as_dtype
from longspan.comm.mesh import SequenceSharding
from longspan.comm.weights import agree_on_model
from longspan.compat.transformers_api import generation_config
from longspan.core.errors import LongspanError
from longspan.core.memory import Memory
from longspan.core.validation import refuse_unknown
from longspan.hf.model.pretrained import (
    base_of,
    check_source,
    is_adapter,
    language_model_class,
    open_config,
    read_adapter,
)
from longspan.hf.parallelize import parallelize
from longspan.hf.weights.origin import Origin, WeightFiles
from longspan.hf.weights.quantized import to_4_bits
from longspan.hf.weights.sources import Files, FirstRank, materialize, to_meta

Prepare = Callable[[Any], Any]


def from_pretrained(
    name: str | Path,
    sp: SequenceSharding,
    *,
    dtype: torch.dtype | str = "auto",
    prepare: Prepare | None = None,
    **options: Any,
) -> Any:
    """Load and parallelize a pretrained model; with FSDP each rank reads its own rows of each weight. Collective.

    It returns the model of `longspan.parallelize(AutoModelForCausalLM.from_pretrained(name, dtype=dtype), sp,
    **options)`, but a rank's host holds at most its shards and one parameter, if the weights are safetensors under the
    model's own names. If transformers must convert them, the first rank loads the full model and sends the others their
    rows. With `fsdp=False`, or on one rank, every rank loads the full model.

    Args:
        name: a folder, the name of a model on the Hugging Face hub, or the folder of a PEFT adapter, which is added to
            the base model that it names. Loaded as a masked LM or a classifier of sequences or tokens if the config's
            `architectures` name one, else as a causal LM or a vision-language model.
        sp: the sharding.
        dtype: of the weights, or its name ("bf16"); "auto": as the config says.
        prepare: called with the model before it is sharded, to wrap or change it: `lambda model: get_peft_model(model,
            lora)`. Its result is parallelized. Weights are not loaded yet (they are NaN). Parameters that it adds must
            not depend on weights, and must be equal on every rank (seed it).
        options: of `longspan.parallelize`, except `weights`.

    Returns:
        The parallelized model, in evaluation mode as transformers returns it.

    Raises:
        LongspanError: on every rank: for missing or damaged files, missing weights, files that differ between ranks,
            and as `parallelize`.
    """
    known = ["dtype", "prepare", *list(inspect.signature(parallelize).parameters)[2:]]
    refuse_unknown("from_pretrained", options, known)
    origin = on_every_rank(lambda: _pretrained(str(name), dtype), sp.world_group)
    return load_sharded(origin, sp, prepare=prepare or _unchanged, **options)


def _pretrained(name: str, dtype: torch.dtype | str) -> Origin:
    import transformers

    asked = None if dtype == "auto" else as_dtype("dtype", dtype)
    check_source("name", name)
    adapter, name = name if is_adapter(name) else None, base_of("name", name)
    config = open_config(name, name)
    kinds = ("MaskedLM", "SequenceClassification", "TokenClassification")
    kind = next((k for k in kinds for name in config.architectures or () if name.endswith(f"For{k}")), None)
    auto = language_model_class(config) if kind is None else getattr(transformers, f"AutoModelFor{kind}")
    asked = asked or config.dtype
    if asked is None:
        raise LongspanError(f"the config of {name} names no dtype; give from_pretrained(..., dtype=torch.bfloat16)")
    return Origin(auto, config, asked, name, label=name, adapter=adapter)


def _unchanged(model: Any) -> Any:
    return model


def load_sharded(
    origin: Origin,
    sp: SequenceSharding,
    *,
    prepare: Prepare = _unchanged,
    later: bool = False,
    whole: bool = False,
    cast_to: torch.dtype | None = None,
    fsdp: bool = True,
    **options: Any,
) -> Any:
    """Parallelize the model of an `origin`; with FSDP its weights are read, or sent, shard by shard. Collective.

    Args:
        origin: the model and its weights.
        sp, prepare, fsdp, options: as in `from_pretrained`, and of `longspan.parallelize`.
        later: the caller fills parameters and persistent buffers (from a checkpoint), so nothing is read.
        whole: every rank's host loads the whole model, as `prepare` computes with its weights.
        cast_to: dtype of the parameters, if it is not the one in which they are loaded.
    """
    sharded, memory_options = fsdp and sp.world_size > 1, options.get("memory")
    offloads = fsdp and isinstance(memory_options, Memory) and memory_options.cpu_offload
    source = find_source(origin, sp, later=later) if sharded and not whole else None
    if source is not None:
        return load_from(source, origin, sp, prepare=prepare, cast_to=cast_to, **options)
    model = on_every_rank(lambda: prepare(origin.build()), sp.world_group)
    model = model if cast_to is None else model.to(cast_to)
    # FSDP moves a layer at a time to the device, and a tensor axis shards each weight on the host.
    on_host = sharded or offloads or sp.tensor_size > 1
    return parallelize(model if on_host else model.to(sp.device), sp, fsdp=fsdp, **options)


def find_source(origin: Origin, sp: SequenceSharding, *, later: bool = False) -> Files | FirstRank | None:
    """Return where each rank gets its shards from; None if every rank must make the full model. Collective.

    Raise on every rank for damaged files, and for files that differ between ranks.
    """
    adapter, base = origin.adapter, dataclasses.replace(origin, adapter=None, four_bits=None)  # `load_from` does both

    def check() -> tuple[tuple[Files | None, bool], dict[str, str], dict[str, int]]:
        facts, reads_base = dict[str, str](), False
        files = None if later or base.name is None else WeightFiles.find(base.name)
        digests = {} if files is None else files.digests()
        source = Files.of(base, files, later)
        facts["the model's weights"] = f"{len(digests)} tensors" if files is not None else "in no safetensors files"
        if adapter is not None:
            facts["the adapter"], reads_base = read_adapter(adapter)
        facts["they are read"] = "by each rank" if source is not None else "by the first rank"
        return (source, reads_base), facts, digests

    source, reads_base = agree_on_model(sp, check)
    if reads_base:
        return None
    return source if source is not None else FirstRank.of(base, sp)


def load_from(
    source: Files | FirstRank,
    origin: Origin,
    sp: SequenceSharding,
    *,
    prepare: Prepare = _unchanged,
    cast_to: torch.dtype | None = None,
    **options: Any,
) -> Any:
    """Parallelize the model of a source, from `find_source` and used once, and fill its shards. Collective."""
    base = source.model
    if origin.name is not None:
        base.eval()
        base.config.name_or_path = origin.name
        if base.can_generate():
            base.generation_config = generation_config(origin.name, base)
    dtypes = {name: p.dtype for name, p in base.named_parameters()}
    layers = {} if origin.four_bits is None else to_4_bits(base, origin.four_bits)
    stubs: dict[nn.Parameter, str] = {p: name for name, p in base.named_parameters()}

    def prepared() -> tuple[Any, dict[str, str]]:
        model = prepare(origin.adapted(base))
        names = to_meta(model, stubs)
        return (model if cast_to is None else model.to(cast_to)), names

    model, names = on_every_rank(prepared, sp.world_group)
    model = parallelize(model, sp, fsdp=True, **options)
    materialize(model, sp.device)
    parameters = {names[name]: p for name, p in model.named_parameters() if name in names}
    source.fill({name: p for name, p in parameters.items() if name not in layers}, layers, dtypes, sp)
    return model
