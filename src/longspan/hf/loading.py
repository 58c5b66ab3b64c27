"""A pretrained model, sharded while it is read: no rank holds all of its weights in its host's memory.

The model is made without memory for its weights, sharded, and then each rank reads the rows that are its own. Where
transformers converts weights while it reads them (experts that are merged, say), or where they are drawn at random,
the first rank makes the whole model and sends every rank its rows, a parameter at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from longspan.compat.transformers_api import generation_config
from longspan.hf.across_ranks import agree_on_model, together
from longspan.hf.hollow import materialize, vacate
from longspan.hf.parallelize import parallelize
from longspan.hf.pretrained import check_weights
from longspan.hf.sources import Files, FirstRank, Origin, Weights
from longspan.hf.weight_files import WeightFiles

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding

Prepare = Callable[[Any], Any]


def from_pretrained(
    name: str,
    sp: SequenceSharding,
    *,
    dtype: torch.dtype | Literal["auto"] = "auto",
    prepare: Prepare | None = None,
    **options: Any,
) -> Any:
    """A pretrained model, loaded and parallelized: with FSDP each rank reads its own rows of each weight.

    The same as `longspan.parallelize(AutoModelForCausalLM.from_pretrained(name, dtype=dtype), sp, **options)`, but that
    a rank's host never holds more than that rank's shards and one parameter, where the weights lie in safetensors files
    by the names that the model has for them. Where transformers converts them on the way, that holds for all ranks but
    the first, which makes the whole model and sends the others their rows. With `fsdp=False`, or on one rank, every
    rank loads the whole model. Collective: call it on every rank.

    Args:
        name: a folder or the name of a model on the Hugging Face hub. A masked LM, if its config's `architectures` name
            one, else a causal LM.
        sp: how the sequence lies over the ranks.
        dtype: of the weights; "auto": as the config says, or else the files.
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
    return load_sharded(_pretrained(name, dtype), sp, prepare=prepare or (lambda model: model), **options)


def _pretrained(name: str, dtype: torch.dtype | Literal["auto"]) -> Origin:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    config = AutoConfig.from_pretrained(name)
    masked = any(kind.endswith("ForMaskedLM") for kind in config.architectures or ())
    auto = AutoModelForMaskedLM if masked else AutoModelForCausalLM

    def build() -> Any:
        model, info = auto.from_pretrained(name, config=copy.deepcopy(config), dtype=dtype, output_loading_info=True)
        check_weights(name, info)
        return model

    if dtype == "auto":
        dtype = config.dtype or torch.float32
    return Origin(build, auto, config, dtype, name)


def load_sharded(
    origin: Origin,
    sp: SequenceSharding,
    *,
    prepare: Prepare = lambda model: model,
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
    source = _source(origin, sp, later) if fsdp and sp.world_size > 1 else None
    if source is None:
        model = together(sp, lambda: prepare(origin.build()))
        return parallelize(model if fsdp and sp.world_size > 1 else model.to(sp.device), sp, fsdp=fsdp, **options)
    base = source.model
    if origin.name is not None:
        base.eval()
        base.config.name_or_path = origin.name
        if base.can_generate():
            base.generation_config = generation_config(origin.name, base)
    model, names, dtypes = together(sp, lambda: _prepared(base, prepare))
    model = parallelize(model, sp, fsdp=True, **options)
    materialize(model, sp.device)
    source.fill(Weights({names[name]: p for name, p in model.named_parameters() if name in names}, dtypes), sp)
    return model


def _prepared(base: Any, prepare: Prepare) -> tuple[Any, dict[str, str], dict[str, torch.dtype]]:
    """What `prepare` makes of the model, on the meta device; what the loaded weights are called there; their dtypes."""
    stubs: dict[nn.Parameter, str] = {p: name for name, p in base.named_parameters()}
    dtypes = {name: p.dtype for p, name in stubs.items()}
    model = prepare(base)
    return model, vacate(model, stubs), dtypes


def _source(origin: Origin, sp: SequenceSharding, later: bool) -> Files | FirstRank | None:
    """Where the weights come from; None where every rank has to make the whole model. Collective."""
    found: Files | None = None
    facts, digests, problem = dict[str, str](), dict[str, int](), None
    try:
        files = None if later or origin.name is None else WeightFiles.find(origin.name)
        digests = {} if files is None else files.digests()
        found = Files.of(origin, files, later)
        facts["the weights"] = f"{len(digests)} tensors" if files is not None else "in no safetensors files"
        facts["they are read"] = "by each rank" if found is not None else "by the first rank"
    except Exception as error:  # of any kind: the other ranks must hear of it
        problem = error
    agree_on_model(sp, facts, digests, problem)
    return found if found is not None else FirstRank.of(origin, sp)
