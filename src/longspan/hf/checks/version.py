"""Check a version of transformers that longspan was not tested with, before a model is sharded on it.

Small models of transformers compute the same batch twice: by transformers alone, and parallelized over the user's mesh.
Together they use everything that longspan replaces: causal, bidirectional, sliding-window and chunked masks, padding,
packed documents, positions counted from a cache, and generation with a KV cache.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor

from longspan.comm.mesh import SequenceSharding
from longspan.comm.objects import gather_objects
from longspan.compat.versions import TESTED, untested
from longspan.core.errors import LongspanError

_MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 8},
    "Llama4Text": {
        "head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 1, "moe_layers": [], "no_rope_layers": [1, 0],
        "attention_chunk_size": 8, "floor_scale": 4, "attn_scale": 0.5,
    },
    "Bert": {"num_key_value_heads": None, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "ModernBert": {"num_key_value_heads": None, "local_attention": 8,
                   "layer_types": ["full_attention", "sliding_attention"], "cls_token_id": 1, "sep_token_id": 2},
}  # fmt: skip
_MASKED = ("Bert", "ModernBert")
_LENGTH, _NEW = 29, 3
_LIMIT = 1e-2  # of the largest logit: TF32 stays below it, a wrong mask does not

_checked: set[str] = set()


def check_version(sp: SequenceSharding, parallelize: Callable[..., Any]) -> None:
    """Warn of an untested version of transformers, and check it once per process. Collective."""
    warning, version = untested("transformers"), transformers.__version__
    if warning is None or version in _checked:
        return
    _checked.add(version)  # first: the check itself calls parallelize
    if sp.data_rank == sp.rank == sp.tensor_rank == 0:
        warnings.warn(warning, stacklevel=3)
    exact = copy.copy(sp)
    exact.wire_dtype, exact.plans = "exact", type(sp.plans)()
    try:
        devices = [sp.device] if sp.device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.device("cpu"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrong = next(_differences(exact, parallelize), None)
    except Exception as error:  # a private name that was removed may raise anything
        wrong = f"{type(error).__name__}: {error}"
    wrong = next((text for text in gather_objects(wrong, sp.mesh_group) if text is not None), None)
    if wrong is not None:
        _checked.discard(version)
        tested = " to ".join(TESTED["transformers"])
        raise LongspanError(f"{warning}. A check of small models failed: {wrong}; install transformers {tested}")


def _differences(sp: SequenceSharding, parallelize: Callable[..., Any]) -> Iterator[str]:
    """Yield how results of a parallelized model differ from those of transformers alone."""
    for family in _MODELS:
        if family in _MASKED and sp.tensor_size > 1:  # the tensor axis shards causal models only
            continue
        plain = _build(family, sp)
        sharded = parallelize(copy.deepcopy(plain), sp, fsdp=False, check_batches=0, check_weights=0)
        for kind, batch in _batches(family, sp).items():
            expected, actual = _logits(plain, batch), _logits(sharded, batch, sp)
            real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
            yield from _compare(f"{family} with {kind}", actual[real], expected[real])
        if family not in _MASKED:
            batch = _batches(family, sp)["padding"]
            yield from _compare(f"{family} in generation", *(_generated(model, batch) for model in (sharded, plain)))


def _compare(what: str, actual: Tensor, expected: Tensor) -> Iterator[str]:
    off = float((actual - expected).abs().max() / expected.abs().max())
    if not off < _LIMIT:
        yield f"logits of {what} differ by {off:.1e} of the largest"


def _build(family: str, sp: SequenceSharding) -> Any:
    heads = sp.tensor_size * max(4, sp.ulysses_size)
    options = {
        "vocab_size": 64 * sp.tensor_size, "hidden_size": 8 * heads, "intermediate_size": 64 * sp.tensor_size,
        "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": heads // 2,
        "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "tie_word_embeddings": False, **_MODELS[family],
    }  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{k: v for k, v in options.items() if v is not None})
    kind: Any = transformers.AutoModelForMaskedLM if family in _MASKED else transformers.AutoModelForCausalLM
    return kind.from_config(config).float().to(sp.device).eval()


def _batches(family: str, sp: SequenceSharding) -> dict[str, dict[str, Tensor]]:
    ids = torch.randint(3, 64, (2, _LENGTH), generator=torch.Generator().manual_seed(1)).to(sp.device)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    batches = {"whole rows": {"input_ids": ids}, "padding": {"input_ids": ids, "attention_mask": mask}}
    if family not in _MASKED:
        positions = torch.cat([torch.arange(11), torch.arange(_LENGTH - 11)])
        batches["packed documents"] = {"input_ids": ids, "position_ids": positions.expand(2, -1).to(sp.device)}
    return batches


def _logits(model: Any, batch: dict[str, Tensor], sp: SequenceSharding | None = None) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(**batch, use_cache=False).logits
    if sp is None:
        return logits
    return sp.gather(logits, dim=1, length=_LENGTH)


def _generated(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the logits of the tokens that a model generates after a batch, `[_NEW, B, V]`."""
    model.generation_config.eos_token_id = None
    out = model.generate(
        **batch, max_new_tokens=_NEW, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    return torch.stack(out.logits)
