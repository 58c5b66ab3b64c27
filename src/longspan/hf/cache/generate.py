"""`model.generate` of a parallelized model: transformers' own loop over a cache sharded over all ranks."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import torch
import torch.distributed as dist

from longspan.comm.agree import gather_numbers, on_every_rank
from longspan.comm.arguments import check_tensor
from longspan.comm.mesh import SequenceSharding
from longspan.compat.transformers_api import keep_from_generate, take_cache
from longspan.core.cache import PREFILL_CHUNK
from longspan.core.errors import LongspanError
from longspan.hf.cache.kv_cache import ShardedCache
from longspan.hf.forward.vision import PromptPictures
from longspan.hf.model.vision import PICTURE_KEYS, chunk_around, core_of, encoders_of, image_spans
from longspan.hf.state import is_parallelized, state_of

PICTURES = tuple(key for key in PICTURE_KEYS if key != "mm_token_type_ids")
"""Batch keys of a prompt that the forwards of `generate` find at the cache; token types are cut with the ids."""


def replace_generate(model: Any) -> None:
    """Replace the `generate` of a parallelized model."""
    if encoders_of(model):
        keep_from_generate(model, PICTURES)
    model.generate = functools.update_wrapper(functools.partial(_generate, model), type(model).generate)


def _generate(model: Any, inputs: Any = None, generation_config: Any = None, **more: Any) -> Any:
    """Make a `ShardedCache`, read the prompt in chunks, seed all ranks equally, and call transformers' `generate`.

    Sampling, stopping, streamers and beams are transformers'. It is called on every rank, with the same arguments on
    every rank of a sequence group.
    """
    sp: SequenceSharding = state_of(model).sp
    settings = generation_config if generation_config is not None else model.generation_config
    cache = take_cache(more)
    _refuse(settings, more, cache)
    implementation = more.pop("cache_implementation", None) or getattr(settings, "cache_implementation", None)
    if implementation is not None:
        if sp.data_rank == sp.rank == sp.tensor_rank == 0:
            warnings.warn(
                f"cache_implementation={implementation!r}: a parallelized model generates with a longspan.ShardedCache",
                stacklevel=2,
            )
        if getattr(settings, "cache_implementation", None) is not None:
            generation_config = settings = copy.deepcopy(settings)
            settings.cache_implementation = None
    tokens = next((x for x in (inputs, more.get("input_ids"), more.get("inputs_embeds")) if x is not None), None)
    if tokens is not None:
        check_tensor("inputs", tokens)
    length = 0 if tokens is None else tokens.shape[1]
    if cache is None:
        asked = _option(settings, more, "max_new_tokens") or 0
        cache = ShardedCache(model, room=length + min(asked, max(length // 8, 1024)))
    is_assistant = getattr(settings, "is_assistant", False)
    if is_assistant or any(_option(settings, more, name) is not None for name in _DRAFTS):
        cache.activate_past_recording()  # rejected drafts are removed from the cache
    more["cache"] = cache
    mask = more.get("attention_mask")
    cache.generated_from = length
    chunk = _option(settings, more, "prefill_chunk_size")
    if state_of(model).traits.encoders:
        pictures = {key: more[key] for key in PICTURES if more.get(key) is not None}
        if tokens is not None:
            cache.pictures = PromptPictures(tokens, pictures)
        elif pictures:
            raise LongspanError(
                f"`{next(iter(pictures))}` without a prompt; give the `input_ids` with its placeholders"
            )
    core = core_of(model) if state_of(model).traits.rotary_3d else None
    _check_grids(model, tokens, more)
    # Without padding: position ids count real tokens. Those behind pictures may be far smaller; each chunk has its own.
    few = core is not None and (cache.is_initialized or (cache.pictures is not None and bool(cache.pictures.batch)))
    cache.announced = 0 if few else length if mask is None else int(mask.sum(-1).max())
    only_new = mask is not None and mask.shape[1] > length  # the mask alone covers what the cache holds
    new = length if only_new else max(0, length - cache.get_seq_length())
    if chunk is None and new > PREFILL_CHUNK * sp.size:
        chunk = PREFILL_CHUNK * sp.size
    types = more.get(state_of(model).traits.image_types or "")
    if chunk is not None and new and types is not None and (spans := image_spans(types[:, -new:])) is not None:
        chunk = chunk_around(spans, new, chunk) or new
    _run_empty_chunks(model, sp, -(-new // (chunk or new)) if new else 1)
    if core is not None and cache.is_initialized:
        _set_position_deltas(core, cache, more)
    cache.position_deltas = None
    if chunk is not None and generation_config is not None:  # transformers requires arguments in one place
        generation_config = copy.deepcopy(generation_config)
        generation_config.prefill_chunk_size = chunk
    elif chunk is not None:
        more["prefill_chunk_size"] = chunk
    if sp.data_size > 1:
        more["synced_gpus"] = True  # a replica that has finished goes on with the others' forwards
    if sp.model_group is not None and sp.size * sp.tensor_size > 1:
        _share_random_state(sp)
    try:
        output = type(model).generate(model, inputs, generation_config=generation_config, **more)
        if core is not None and core.rope_deltas is not None:
            cache.position_deltas = core.rope_deltas, length
        return output
    finally:
        cache.announced, cache.generated_from, cache.pictures = 0, None, None
        if not is_assistant:  # an assistant's drafts are cropped afterwards
            cache.rollback = None


def _check_grids(model: Any, tokens: Any, more: dict[str, Any]) -> None:
    """Raise on every rank if transformers cannot compute a rank's positions: it does so before the first forward, in
    which the ranks compare their prompts. Collective.
    """
    state, grids = state_of(model), ("image_grid_thw", "video_grid_thw")
    if not state.traits.rotary_3d:
        return
    batch = {**more, "input_ids": tokens}
    known = tokens is None or tokens.is_floating_point() or all(more.get(key) is None for key in grids)
    checks = state.forward.batches
    group = None if checks is None or checks.left == 0 else checks.group
    on_every_rank(lambda: None if known else state.traits.positions(batch), group)


def _set_position_deltas(core: Any, cache: ShardedCache, more: dict[str, Any]) -> None:
    """Let the model know the positions behind a cache's pictures: it knows those of its last prompt, of any cache."""
    if any(more.get(key) is not None for key in ("image_grid_thw", "video_grid_thw")):
        core.rope_deltas = None  # it reads them from the whole prompt
    elif cache.position_deltas is not None:
        core.rope_deltas, length = cache.position_deltas
        past = cache.get_seq_length()
        if past < length and bool(core.rope_deltas.any()):
            raise LongspanError(
                f"the cache was cropped to {past} of the {length} tokens of a prompt with pictures; give this prompt "
                f"its pictures (the batch that the processor makes of all of it), so that positions are known"
            )


def _run_empty_chunks(model: Any, sp: SequenceSharding, chunks: int) -> None:
    """Run as many forwards as other replicas have more chunks: forwards are collective. Each computes one token, whose
    result is dropped.
    """
    if sp.data_size == 1 or sp.fsdp_group is None:
        return
    most = max(count for (count,) in gather_numbers([chunks], sp.fsdp_group))
    for _ in range(most - chunks):
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=sp.device), use_cache=False)


def _share_random_state(sp: SequenceSharding) -> None:
    """Copy the random state of the sequence's first rank to the others."""
    assert sp.model_group is not None
    device = sp.device
    modules: list[Any] = [torch] if device.type == "cpu" else [torch, torch.get_device_module(device)]
    for module in modules:
        shared = module.get_rng_state().to(device)
        dist.broadcast(shared, group=sp.model_group, group_src=0)
        module.set_rng_state(shared.cpu())


_DRAFTS = ("assistant_model", "prompt_lookup_num_tokens")


def _option(settings: Any, more: dict[str, Any], name: str) -> Any:
    return more.get(name, getattr(settings, name, None))


def _refuse(settings: Any, more: dict[str, Any], cache: Any) -> None:
    if cache is not None and not isinstance(cache, ShardedCache):
        raise LongspanError(
            f"the cache is a {type(cache).__name__}; a parallelized model generates with a "
            f"longspan.ShardedCache(model), or makes one by itself"
        )
    if _option(settings, more, "use_cache") is False:
        raise LongspanError(
            "use_cache=False would compute the whole sequence again for every token; a parallelized model generates "
            "with its cache: leave use_cache out"
        )
    implementation = _option(settings, more, "cache_implementation")
    if implementation not in (None, "dynamic", "dynamic_full", "static"):
        raise LongspanError(
            f"cache_implementation={implementation!r}: a parallelized model generates with its own "
            f"cache over the ranks; leave it out, or pass a longspan.ShardedCache(model, dtype=..., offload=...)"
        )
    if _option(settings, more, "assistant_early_exit") is not None:
        raise LongspanError(
            "assistant_early_exit drafts with some layers of the model itself, whose cache would hold tokens of two "
            "kinds; use assistant_model or prompt_lookup_num_tokens"
        )
    assistant = more.get("assistant_model")
    if assistant is not None and is_parallelized(assistant) and state_of(assistant).mixers.layers:
        raise LongspanError(
            f"layer {state_of(assistant).mixers.layers[0].name} of assistant_model is recurrent, and its state cannot "
            f"forget drafted tokens that are rejected; use another assistant_model"
        )
    if assistant is not None and is_parallelized(assistant) and state_of(assistant).sp.data_size > 1:
        raise LongspanError(
            "assistant_model is parallelized, and replicas would draft different numbers of tokens, so that their "
            "forwards would wait for each other; give the plain model, or a mesh with data=1"
        )
