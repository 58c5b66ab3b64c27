"""Repeat the first rank's calls of a `Scorer` on every rank."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from longspan.comm.objects import broadcast_object
from longspan.core.errors import LongspanError
from longspan.core.parallel import ParallelConfig
from longspan.lm_eval.scorer import Scorer

_LOAD, _END = "load", "end"


class Leader:
    """A `Scorer` over all ranks, used by the first rank while the others run `serve`. `options` are `load_scorer`'s.

    Raises:
        LongspanError: on another rank, or as `load_scorer`.
    """

    def __init__(self, **options: Any) -> None:
        if dist.is_initialized() and dist.get_rank() != 0:
            raise LongspanError("only the first rank calls the model; the others call longspan.lm_eval.ranks.serve()")
        broadcast_object((_LOAD, options), _world())
        self.scorer = load_scorer(**options)

    def ask(self, name: str, **arguments: Any) -> Any:
        """Call a method of the scorer on every rank and return its result."""
        broadcast_object((name, arguments), _world())
        return getattr(self.scorer, name)(**arguments)


def serve() -> None:
    """Repeat the first rank's calls on another rank, until it calls `end`."""
    scorer: Scorer | None = None
    while True:
        name, arguments = broadcast_object(None, _world())
        if name == _END:
            return
        if name == _LOAD:
            scorer = load_scorer(**arguments)
        else:
            getattr(scorer, name)(**arguments)


def end() -> None:
    """End `serve` on the other ranks."""
    broadcast_object((_END, {}), _world())


def load_scorer(
    pretrained: str,
    ring: int = 1,
    ulysses: int = 1,
    tensor: int = 1,
    dtype: str = "auto",
    tokenizer: str | None = None,
    max_length: int | None = None,
    batch_size: int = 1,
    fsdp: bool = True,
) -> Scorer:
    """Load a pretrained model over the ranks of the job. Collective.

    Args:
        pretrained: folder of a model or a PEFT adapter, or a name on the Hugging Face hub.
        ring: size of the ring axis.
        ulysses: size of the ulysses axis.
        tensor: size of the tensor axis.
        dtype: of the weights: "auto", "float32", "bfloat16" or "float16".
        tokenizer: name or folder; by default the model's.
        max_length: most tokens that the model accepts; by default from its config.
        batch_size: most rows of a batch.
        fsdp: shard the weights.

    Raises:
        LongspanError: for a model that cannot be loaded, or a mesh of another size than the job.
    """
    import torch
    from transformers import AutoTokenizer

    from longspan.comm.mesh import make_sharding
    from longspan.hf.loading import from_pretrained
    from longspan.hf.pretrained import tokenizer_of

    if dtype not in _DTYPES:
        raise LongspanError(f"dtype={dtype!r}: use one of {', '.join(_DTYPES)}")
    sp = make_sharding(ParallelConfig(ring=ring, ulysses=ulysses, tensor=tensor))
    of: Any = "auto" if dtype == "auto" else getattr(torch, dtype)
    model = from_pretrained(pretrained, sp, dtype=of, fsdp=fsdp).eval()
    reader = AutoTokenizer.from_pretrained(tokenizer or tokenizer_of("pretrained", pretrained))
    return Scorer(model, sp, reader, max_length or _longest(model.config, reader), batch_size)


_DTYPES = ("auto", "float32", "bfloat16", "float16")
_DEFAULT_LENGTH = 2048


def _longest(config: Any, tokenizer: Any) -> int:
    """Return the most tokens that the model accepts, from config or tokenizer as the harness does."""
    for name in ("n_positions", "max_position_embeddings", "n_ctx"):
        if isinstance(length := getattr(config, name, None), int):
            return length
    length = tokenizer.model_max_length
    return int(length) if length and length < 10**9 else _DEFAULT_LENGTH


def _world() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() else None
