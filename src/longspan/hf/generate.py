"""`model.generate` of a parallelized model: transformers' own loop over a cache that lies on all ranks."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from longspan.comm.arguments import check_tensor
from longspan.comm.consistency import gather_numbers
from longspan.compat.transformers_api import cache_name, take_cache
from longspan.core.errors import LongspanError
from longspan.core.kv_placement import PREFILL_CHUNK
from longspan.hf.forward.kv_cache import ShardedCache
from longspan.hf.state import is_parallelized, state_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from longspan.comm.mesh import SequenceSharding


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
        self.said = False  # whether the warning about another cache was given
        functools.update_wrapper(self, type(model).generate)

    def __call__(self, inputs: Any = None, generation_config: Any = None, **more: Any) -> Any:
        """See transformers' `GenerationMixin.generate`.

        Raises:
            LongspanError: for another cache than a `ShardedCache`, or a way of generating that it does not go with.
        """
        model = self.model
        settings = generation_config if generation_config is not None else model.generation_config
        cache = take_cache(more)
        _refuse(settings, more, cache)
        name = more.pop("cache_implementation", None) or getattr(settings, "cache_implementation", None)
        if name is not None:
            self._say_once(
                f"cache_implementation={name!r}: a parallelized model generates with a longspan.ShardedCache"
            )
            if getattr(settings, "cache_implementation", None) is not None:
                generation_config = settings = copy.deepcopy(settings)
                settings.cache_implementation = None
        tokens = next((x for x in (inputs, more.get("input_ids"), more.get("inputs_embeds")) if x is not None), None)
        if tokens is not None:
            check_tensor("inputs", tokens)
        length = 0 if tokens is None else tokens.shape[1]
        if cache is None:
            cache = ShardedCache(model, room=_room(settings, more, length))
        if _drafts(settings, more) or getattr(settings, "is_assistant", False):
            cache.activate_past_recording()
        more[cache_name(type(model).forward)] = cache
        mask = more.get("attention_mask")
        # Without padding: position ids count real tokens.
        cache.announced = length if mask is None else int(mask.sum(-1).max())
        chunk = more.get("prefill_chunk_size", getattr(settings, "prefill_chunk_size", None))
        if chunk is None and length > PREFILL_CHUNK * self.sp.size:
            chunk = PREFILL_CHUNK * self.sp.size
        chunk = self._chunks_alike(length - cache.get_seq_length(), chunk)
        if chunk is not None and generation_config is not None:  # transformers wants arguments in one place
            generation_config = copy.deepcopy(generation_config)
            generation_config.prefill_chunk_size = chunk
        elif chunk is not None:
            more["prefill_chunk_size"] = chunk
        if self.sp.data_size > 1:
            more["synced_gpus"] = True  # a replica that has finished goes on with the others' forwards
        if self.sp.replica_group is not None and self.sp.size * self.sp.tensor_size > 1:
            self._draw_alike()
        try:
            return type(model).generate(model, inputs, generation_config, **more)
        finally:
            cache.announced = 0
            if not getattr(settings, "is_assistant", False):  # an assistant's drafts are cropped afterwards
                cache.rollback = None

    def _say_once(self, text: str) -> None:
        if not self.said and self.sp.data_rank == self.sp.rank == self.sp.tensor_rank == 0:
            warnings.warn(text, stacklevel=3)
        self.said = True

    def _chunks_alike(self, tokens: int, chunk: int | None) -> int | None:
        """The size of a prompt's chunks, such that every replica has as many: their forwards are collective.

        Raises:
            LongspanError: on every rank, where a replica's prompt does not have so many tokens.
        """
        if self.sp.data_size == 1 or self.sp.world_group is None:
            return chunk
        mine = [tokens, chunk or tokens]
        every = gather_numbers(mine, self.sp.world_group, self.sp.device)
        most = max(-(-tokens // max(1, chunk)) for tokens, chunk in every)
        if most <= 1:
            return chunk
        found = [next((c for c in range(-(-n // most), 0, -1) if -(-n // c) == most), 0) for n, _ in every]
        if not all(found):
            few = found.index(0)
            raise LongspanError(
                f"the replicas' prompts come in {most} chunks, since one of them has "
                f"{max(n for n, _ in every)} tokens, and {every[few][0]} tokens (rank {few}) are not cut into so many; "
                f"give the replicas prompts of about one length, or a larger prefill_chunk_size"
            )
        return found[self.sp.data_rank * self.sp.size]

    def _draw_alike(self) -> None:
        """Every rank of the sequence draws what its first one does."""
        assert self.sp.replica_group is not None
        device = self.sp.device
        modules: list[Any] = [torch] if device.type == "cpu" else [torch, torch.get_device_module(device)]
        for module in modules:
            state = module.get_rng_state()
            shared = state.to(device)
            dist.broadcast(shared, group=self.sp.replica_group, group_src=0)
            module.set_rng_state(shared.cpu())


def _room(settings: Any, more: dict[str, Any], prompt: int) -> int:
    """Tokens to have room for: the prompt, and what may be generated, as far as that is not much more."""
    asked = more.get("max_new_tokens", getattr(settings, "max_new_tokens", None)) or 0
    return prompt + min(asked, max(prompt // 8, 1024))


def _refuse(settings: Any, more: dict[str, Any], cache: Any) -> None:
    def asked(name: str) -> Any:
        return more.get(name, getattr(settings, name, None))

    if cache is not None and not isinstance(cache, ShardedCache):
        raise LongspanError(
            f"the cache is a {type(cache).__name__}; a parallelized model generates with a "
            f"longspan.ShardedCache(model), or makes one by itself"
        )
    if asked("use_cache") is False:
        raise LongspanError(
            "use_cache=False would compute the whole sequence again for every token; a parallelized model generates "
            "with its cache: leave use_cache out"
        )
    if asked("cache_implementation") not in (None, "dynamic", "dynamic_full", "static"):
        raise LongspanError(
            f"cache_implementation={asked('cache_implementation')!r}: a parallelized model generates with its own "
            f"cache over the ranks; leave it out, or pass a longspan.ShardedCache(model, dtype=..., offload=...)"
        )
    if asked("assistant_early_exit") is not None:
        raise LongspanError(
            "assistant_early_exit drafts with some layers of the model itself, whose cache would hold tokens of two "
            "kinds; use assistant_model or prompt_lookup_num_tokens"
        )
    assistant = more.get("assistant_model")
    if assistant is not None and is_parallelized(assistant) and state_of(assistant).sp.data_size > 1:
        raise LongspanError(
            "assistant_model is parallelized, and replicas would draft different numbers of tokens, so that their "
            "forwards would wait for each other; give the plain model, or a mesh with data=1"
        )


def _drafts(settings: Any, more: dict[str, Any]) -> bool:
    """Return whether tokens are drafted, so that rejected ones are removed from the cache."""
    names = "assistant_model", "prompt_lookup_num_tokens"
    return any(more.get(name, getattr(settings, name, None)) is not None for name in names)
