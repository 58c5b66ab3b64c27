"""The first rank asks, all ranks compute: its calls of a `Scorer` are made on every rank."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from longspan.comm.objects import broadcast_object
from longspan.core.errors import LongspanError
from longspan.core.parallel import ParallelConfig
from longspan.lm_eval.scorer import Scorer

_LOAD, _END = "load", "end"


class Leader:
    """A `Scorer` over all ranks, for the first one. The others are in `serve`.

    Args:
        options: of `load_scorer`.

    Raises:
        LongspanError: on another rank, or as `load_scorer` does.
    """

    def __init__(self, **options: Any) -> None:
        if dist.is_initialized() and dist.get_rank() != 0:
            raise LongspanError("the first rank alone asks the model; the others call longspan.lm_eval.ranks.serve()")
        _tell(_LOAD, options)
        self.scorer = load_scorer(**options)

    def ask(self, name: str, **arguments: Any) -> Any:
        """What a method of the scorer returns, called on every rank."""
        _tell(name, arguments)
        return getattr(self.scorer, name)(**arguments)


def serve() -> None:
    """On every rank but the first: make its calls, until it calls `end`."""
    scorer: Scorer | None = None
    while True:
        name, arguments = _told()
        if name == _END:
            return
        if name == _LOAD:
            scorer = load_scorer(**arguments)
        else:
            getattr(scorer, name)(**arguments)


def end() -> None:
    """On the first rank: nothing is asked any more."""
    _tell(_END, {})


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
    """A pretrained model over the ranks of the job. Collective.

    Args:
        pretrained: a folder, of a model or of a PEFT adapter, or a name on the Hugging Face hub.
        ring: degree of the ring.
        ulysses: degree of Ulysses.
        tensor: ranks that share each layer's weights.
        dtype: of the weights: "auto", "float32", "bfloat16" or "float16".
        tokenizer: another than the model's.
        max_length: tokens that the model may be given; by default what its config says.
        batch_size: rows of a batch at most.
        fsdp: whether weights are sharded as well.

    Raises:
        LongspanError: for a model that cannot be loaded, or a mesh that is not that of the job.
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
    """Tokens that the model may be given, as the harness reads it from config and tokenizer."""
    for name in ("n_positions", "max_position_embeddings", "n_ctx"):
        if isinstance(found := getattr(config, name, None), int):
            return found
    found = tokenizer.model_max_length
    return int(found) if found and found < 10**9 else _DEFAULT_LENGTH


def _alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


def _tell(name: str, arguments: dict[str, Any]) -> None:
    if not _alone():
        broadcast_object((name, arguments), dist.group.WORLD)


def _told() -> tuple[str, dict[str, Any]]:
    call: tuple[str, dict[str, Any]] = broadcast_object(None, dist.group.WORLD)
    return call
