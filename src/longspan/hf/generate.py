"""`model.generate` of a parallelized model: transformers' own loop over a cache that lies on all ranks."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from longspan.core.errors import LongspanError
from longspan.hf.kv_cache import ShardedCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from longspan.comm.mesh import SequenceSharding

CHUNK = 8192
"""Tokens per rank of a prompt's chunk, unless `prefill_chunk_size` says otherwise: what bounds a prefill's memory."""


class Generate:
    """In the place of a model's `generate`: a cache of its own kind, prompts in chunks, random numbers alike.

    Everything else is transformers': sampling, stopping, streamers, beams. The same call is made on every rank, with
    the same prompt on every rank of a sequence group.

    Args:
        model: the transformers model.
        sp: its sharding.
    """

    def __init__(self, model: PreTrainedModel, sp: SequenceSharding) -> None:
        self.model, self.sp = model, sp
        functools.update_wrapper(self, type(model).generate)

    def __call__(self, inputs: Any = None, generation_config: Any = None, **more: Any) -> Any:
        """See transformers' `GenerationMixin.generate`.

        Raises:
            LongspanError: for another cache than a `ShardedCache`, or a way of generating that it does not go with.
        """
        model = self.model
        settings = generation_config if generation_config is not None else model.generation_config
        _refuse(settings, more)
        cache = more.get("past_key_values")
        if cache is None:
            cache = more["past_key_values"] = ShardedCache(model)
        tokens = next((x for x in (inputs, more.get("input_ids"), more.get("inputs_embeds")) if x is not None), None)
        length = 0 if tokens is None else tokens.shape[1]
        mask = more.get("attention_mask")
        cache.announced = length if mask is None else mask.shape[1]
        chunk = more.get("prefill_chunk_size", getattr(settings, "prefill_chunk_size", None))
        if chunk is None and length > CHUNK * self.sp.size:
            more["prefill_chunk_size"] = CHUNK * self.sp.size
        if self.sp.size > 1:
            self._draw_alike()
        try:
            return type(model).generate(model, inputs, generation_config, **more)
        finally:
            cache.announced = 0

    def _draw_alike(self) -> None:
        """Every rank of the sequence group draws what its first one does."""
        assert self.sp.group is not None
        device = self.sp.device
        modules: list[Any] = [torch] if device.type == "cpu" else [torch, torch.get_device_module(device)]
        for module in modules:
            state = module.get_rng_state()
            shared = state.to(device)
            dist.broadcast(shared, group=self.sp.group, group_src=0)
            module.set_rng_state(shared.cpu())


def _refuse(settings: Any, more: dict[str, Any]) -> None:
    def asked(name: str) -> Any:
        return more.get(name, getattr(settings, name, None))

    cache = more.get("past_key_values")
    if cache is not None and not isinstance(cache, ShardedCache):
        raise LongspanError(
            f"past_key_values is a {type(cache).__name__}; a parallelized model generates with a "
            f"longspan.ShardedCache(model), or makes one by itself"
        )
    if asked("use_cache") is False:
        raise LongspanError(
            "use_cache=False would compute the whole sequence again for every token; a parallelized model generates "
            "with its cache: leave use_cache out"
        )
    if asked("cache_implementation") is not None:
        raise LongspanError(
            f"cache_implementation={asked('cache_implementation')!r}: a parallelized model generates with its own "
            f"cache over the ranks; leave it out"
        )
    for name in ("assistant_model", "prompt_lookup_num_tokens"):
        if asked(name) is not None:
            raise LongspanError(f"{name}: assisted generation is not supported on a parallelized model; leave it out")
