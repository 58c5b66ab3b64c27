"""A pretrained model, sharded while it is read: no rank holds all of its weights in its host's memory.

The model is made without memory for its weights, sharded, and then each rank reads the rows that are its own. Where
transformers converts weights while it reads them (experts that are merged, say), or where they are drawn at random,
the first rank makes the whole model and sends every rank its rows, a parameter at a time.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from longspan.comm.arguments import as_dtype, check_sharding, describe
from longspan.comm.consistency import check_same_model
from longspan.comm.errors import on_every_rank
from longspan.compat.transformers_api import generation_config
from longspan.core.errors import LongspanError
from longspan.core.memory import Memory
from longspan.core.validation import checked_call, refuse_unknown
from longspan.hf.parallelize import parallelize
from longspan.hf.pretrained import base_of, check_source, first_line, is_adapter, read_adapter
from longspan.hf.weights.files import WeightFiles
from longspan.hf.weights.meta_init import materialize, vacate
from longspan.hf.weights.sources import Files, FirstRank, Origin, Weights

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding

Prepare = Callable[[Any], Any]


def _as_name(argument: str, name: Any) -> str:
    if not isinstance(name, str | Path):
        raise LongspanError(
            f"`{argument}` must be a folder or the name of a model on the Hugging Face hub, got {describe(name)}; pass "
            "a model object to longspan.parallelize instead"
        )
    return str(name)


def _as_dtype(argument: str, dtype: Any) -> torch.dtype | str:
    return "auto" if dtype == "auto" else as_dtype(argument, dtype)


def _check_prepare(argument: str, prepare: Any) -> None:
    if prepare is not None and not callable(prepare):
        raise LongspanError(f"`{argument}` must be a function of the model, got {describe(prepare)}")


@checked_call(name=_as_name, sp=lambda _, sp: check_sharding(sp), dtype=_as_dtype, prepare=_check_prepare)
def from_pretrained(
    name: str | Path,
    sp: SequenceSharding,
    *,
    dtype: torch.dtype | str = "auto",
    prepare: Prepare | None = None,
    **options: Any,
) -> Any:
    """A pretrained model, loaded and parallelized: with FSDP each rank reads its own part of each weight.

    The same as `longspan.parallelize(AutoModelForCausalLM.from_pretrained(name, dtype=dtype), sp, **options)`, but that
    a rank's host never holds more than that rank's shards and one parameter, where the weights lie in safetensors files
    by the names that the model has for them. Where transformers converts them on the way, that holds for all ranks but
    the first, which makes the whole model and sends the others their rows. With `fsdp=False`, or on one rank, every
    rank loads the whole model. Collective: call it on every rank.

    Args:
        name: a folder or the name of a model on the Hugging Face hub, or the folder of a PEFT adapter, which is put on
            the base model that it names. A masked LM or a classifier of sequences or
            tokens, if its config's `architectures` name one, else a causal LM.
        sp: how the sequence lies over the ranks.
        dtype: of the weights, or its name ("bf16"); "auto": as the config says.
        prepare: called with the model before it is sharded, while its weights have no values yet (they are NaN), to
            wrap or change it: `lambda model: get_peft_model(model, lora)`. What it returns is parallelized. Parameters
            that it adds must be alike on every rank (seed it), and not depend on the weights.
        options: of `longspan.parallelize`, but for `weights`.

    Returns:
        The parallelized model, in evaluation mode like transformers'.

    Raises:
        LongspanError: on every rank alike: for files that are missing or damaged, weights that are missing, ranks whose
            files differ, or what `parallelize` refuses.
    """
    known = ["dtype", "prepare", *list(inspect.signature(parallelize).parameters)[2:]]
    refuse_unknown("from_pretrained", options, known)
    origin = on_every_rank(lambda: _pretrained(str(name), dtype), sp.mesh_group)
    return load_sharded(origin, sp, prepare=prepare or _as_it_is, **options)


def _pretrained(name: str, dtype: torch.dtype | str) -> Origin:
    import transformers
    from transformers import AutoConfig

    check_source("name", name)
    adapter, name = name if is_adapter(name) else None, base_of("name", name)
    try:
        config = AutoConfig.from_pretrained(name)
    except Exception as error:
        raise LongspanError(f"{name}: no model config can be read there: {first_line(error)}") from error
    kinds = ("MaskedLM", "SequenceClassification", "TokenClassification")
    kind = next((k for k in kinds for name in config.architectures or () if name.endswith(f"For{k}")), "CausalLM")
    if dtype == "auto":
        dtype = config.dtype
    if not isinstance(dtype, torch.dtype):
        raise LongspanError(f"the config of {name} names no dtype; give from_pretrained(..., dtype=torch.bfloat16)")
    return Origin(getattr(transformers, f"AutoModelFor{kind}"), config, dtype, name, said=name, adapter=adapter)


def _as_it_is(model: Any) -> Any:
    return model


def load_sharded(
    origin: Origin,
    sp: SequenceSharding,
    *,
    prepare: Prepare = _as_it_is,
    later: bool = False,
    fsdp: bool = True,
    **options: Any,
) -> Any:
    """The model of an `origin`, parallelized; with FSDP its weights are read, or sent, shard by shard. Collective.

    Args:
        origin: of the model, the same on every rank.
        sp: how the sequence lies over the ranks.
        prepare: as in `from_pretrained`.
        later: the caller fills parameters and persistent buffers afterwards (from a checkpoint): nothing is read.
        fsdp: as in `parallelize`.
        options: of `parallelize`.

    Raises:
        LongspanError: as `from_pretrained`.
    """
    sharded, memory_options = fsdp and sp.job_size > 1, options.get("memory")
    offloads = fsdp and isinstance(memory_options, Memory) and memory_options.cpu_offload
    source = find_source(origin, sp, later=later) if sharded else None
    if source is not None:
        return load_from(source, origin, sp, prepare=prepare, **options)
    model = on_every_rank(lambda: prepare(origin.build()), sp.mesh_group)
    # FSDP takes a layer at a time to the device, and a tensor axis cuts each weight on the host.
    stays = sharded or offloads or sp.tensor_size > 1
    return parallelize(model if stays else model.to(sp.device), sp, fsdp=fsdp, **options)


def find_source(origin: Origin, sp: SequenceSharding, *, later: bool = False) -> Files | FirstRank | None:
    """Where each rank gets its shards from; None where every rank has to make the whole model. Collective.

    Raises:
        LongspanError: on every rank, for files that are damaged, or that differ between ranks.
    """
    adapter, origin = origin.adapter, dataclasses.replace(origin, adapter=None)  # `load_from` puts it on
    found: Files | None = None
    needs_weights = False
    facts, digests, problem = dict[str, str](), dict[str, int](), None
    try:
        files = None if later or origin.name is None else WeightFiles.find(origin.name)
        digests = {} if files is None else files.digests()
        found = Files.of(origin, files, later)
        facts["the model's weights"] = f"{len(digests)} tensors" if files is not None else "in no safetensors files"
        if adapter is not None:
            facts["the adapter"], needs_weights = read_adapter(adapter)
        facts["they are read"] = "by each rank" if found is not None else "by the first rank"
    except Exception as error:  # of any kind: the other ranks must hear of it
        problem = error
    check_same_model(sp, facts, digests, problem)
    if needs_weights:
        return None
    return found if found is not None else FirstRank.of(origin, sp)


def load_from(
    source: Files | FirstRank,
    origin: Origin,
    sp: SequenceSharding,
    *,
    prepare: Prepare = _as_it_is,
    kept: torch.dtype | None = None,
    **options: Any,
) -> Any:
    """The second half of `load_sharded`. Collective.

    Args:
        source: that `find_source` has found; it can be used once.
        origin: that it was found for.
        sp: how the sequence lies over the ranks.
        prepare: as in `from_pretrained`.
        kept: the dtype to which weights are cast when they have been read; by default they are not.
        options: of `parallelize`.

    Raises:
        LongspanError: as `from_pretrained`.
    """
    base = source.model
    if origin.name is not None:
        base.eval()
        base.config.name_or_path = origin.name
        if base.can_generate():
            base.generation_config = generation_config(origin.name, base)
    model, names, dtypes = on_every_rank(
        lambda: _prepared(base, lambda it: prepare(origin.adapted(it)), kept), sp.mesh_group
    )
    model = parallelize(model, sp, fsdp=True, **options)
    materialize(model, sp.device)
    source.fill(Weights({names[name]: p for name, p in model.named_parameters() if name in names}, dtypes), sp)
    return model


def _prepared(
    base: Any, prepare: Prepare, kept: torch.dtype | None
) -> tuple[Any, dict[str, str], dict[str, torch.dtype]]:
    """What `prepare` makes of the model, on the meta device; what the loaded weights are called there; their dtypes."""
    stubs: dict[nn.Parameter, str] = {p: name for name, p in base.named_parameters()}
    dtypes = {name: p.dtype for p, name in stubs.items()}
    model = prepare(base)
    names = vacate(model, stubs)
    return model if kept is None else model.to(kept), names, dtypes
