"""Linear attention over a sharded sequence: plain, with decay, with the delta rule; causal, or bidirectional."""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.comm.arguments import check_sharding, describe
from longspan.compat.friends_api import fla_function, fla_over_ranks
from longspan.compat.torch_api import not_compiled
from longspan.core.errors import LongspanError
from longspan.core.validation import check_flag
from longspan.mixers.fla import DecayFunction, DeltaRuleFunction
from longspan.mixers.fragments import fragment_table, read_documents
from longspan.mixers.mixer import Mixer, Tokens
from longspan.mixers.plain_torch import LinearAttention
from longspan.mixers.state_passing import check_initial_state, pass_states

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding


@not_compiled
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sp: SequenceSharding,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    causal: bool = True,
    length: int | None = None,
    documents: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute linear attention of the local tokens over the whole sequence, with gradients, on every mesh.

    Every document starts from a zero state. For each token and value head

        S_t = (I - beta_t k_t k_t^T) Diag(exp(decay_t)) S_{t-1} + beta_t k_t v_t^T        o_t = q_t . S_t

    and without `beta` S_t = Diag(exp(decay_t)) S_{t-1} + k_t v_t^T. There is no scale and no normaliser.

    Args:
        q: local tokens, `[batch, tokens, heads, key dim]`, as `sp.shard` cut them.
        k: as `q`.
        v: `[batch, tokens, value heads, value dim]`; the heads of q and k divide the value heads.
        sp: the sharding.
        decay: in log space and at most 0, `[batch, tokens, value heads]` or `[batch, tokens, value heads, key dim]`. A
            larger value is an error on CPUs; GPUs do not check, which would wait.
        beta: strength of the delta rule, `[batch, tokens, value heads]`, usually 0 to 1, with keys of length 1.
        causal: False if every token sees its whole document; only without decay and beta.
        length: real tokens of the whole sequence, if `sp.shard` padded it; default: the tokens of all ranks.
        documents: int64 `[batch, length]`, the document id of every token of the whole sequence, equal on every rank;
            an id below 0 is padding, whose output is 0.
        initial_state: `[batch, value heads, key dim, value dim]`, the state before the first document of every row,
            equal on every rank. Its gradient is this rank's part.
        return_state: also return the state after the last token of every row, equal on every rank.

    Returns:
        `[batch, tokens, value heads, value dim]`, and with `return_state` the state, in fp32 at least.

    Raises:
        LongspanError: for tensors that do not fit, before anything is sent, on every rank with such tensors; on CPUs
            for a decay above 0, and by state passing for a state that is not finite, on every rank, naming the first
            rank that has it.
    """
    check_sharding(sp)
    tokens = _checked(q, k, v, decay, beta)
    _check_options(tokens, causal, initial_state, return_state)
    length, segments = read_documents(q, sp, length, documents)
    mixer = default_mixer(tokens, causal)
    table = fragment_table(sp.layout, sp.rank, length, q.shape[0], segments)
    out, state = pass_states(
        mixer, tokens, table, sp.group if sp.size > 1 else None, initial_state=initial_state, return_state=return_state,
        problem=_decay_problem(tokens),
    )  # fmt: skip
    if not return_state:
        return out
    assert state is not None
    return out, state


def default_mixer(tokens: Tokens, causal: bool = True) -> Mixer:
    """Return linear attention by flash-linear-attention's kernels where they run, otherwise in plain torch."""
    if causal and tokens.q.device.type == "cuda" and tokens.q.dtype != torch.float64:
        per_key = tokens.decay is not None and tokens.decay.dim() == 4
        function = fla_function(per_key, tokens.beta is not None)
        if function is not None and tokens.beta is None:
            return DecayFunction(function)
        if function is not None:
            return DeltaRuleFunction(function, exchanging=fla_over_ranks(per_key, scale=1.0))
        _warn_of_plain_torch()
    return LinearAttention(causal)


@functools.cache
def _warn_of_plain_torch() -> None:
    """Warn once in a process, and on one rank."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        warnings.warn(
            "linear attention runs in plain torch on this GPU, several times slower and with more memory: "
            "flash-linear-attention is not installed; install longspan with its extra 'fla' (pip install \".[fla]\")",
            stacklevel=4,
        )


# ---------------------------------------------------------------------------------------------------------------------
# Checks: of facts that are equal on every rank, but for the last one.


def _checked(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None) -> Tokens:
    given = {"q": q, "k": k, "v": v, "decay": decay, "beta": beta}
    for name, x in given.items():
        if not (isinstance(x, Tensor) and x.is_floating_point()) and (x is not None or name in "qkv"):
            raise LongspanError(f"`{name}` must be a floating tensor, got {describe(x)}")
    tokens = Tokens(q, k, v, decay, beta)
    listed = ", ".join(f"{name} {tuple(x.shape)}" for name, x in given.items() if x is not None)
    if not q.dim() == k.dim() == v.dim() == 4:
        raise LongspanError(f"linear attention needs q, k and v of [batch, tokens, heads, dim], got {listed}")
    if len({x.device for x in tokens if x is not None}) > 1 or not q.dtype == k.dtype == v.dtype:
        raise LongspanError(
            f"linear attention needs q, k and v of one dtype, and all tensors on one device, got "
            f"{', '.join(f'{name} {x.dtype} on {x.device}' for name, x in given.items() if x is not None)}"
        )
    if q.shape != k.shape or q.shape[:2] != v.shape[:2] or 0 in (*q.shape, *v.shape) or v.shape[2] % q.shape[2]:
        raise LongspanError(
            f"linear attention needs q and k of one shape, v with the same batch and tokens, and value heads that the "
            f"heads of q and k divide, got {listed}"
        )
    heads = tuple(v.shape[:3])
    if beta is not None and tuple(beta.shape) != heads:
        raise LongspanError(f"`beta` needs one number per token and value head, {heads}, got {tuple(beta.shape)}")
    if decay is not None and tuple(decay.shape) not in (heads, (*heads, k.shape[3])):
        raise LongspanError(
            f"`decay` needs one number per token and value head, {heads}, or per key dim too, {(*heads, k.shape[3])}, "
            f"got {tuple(decay.shape)}"
        )
    return tokens


def _check_options(tokens: Tokens, causal: bool, initial_state: Tensor | None, return_state: bool) -> None:
    check_flag("causal", causal)
    check_flag("return_state", return_state)
    if not causal and (tokens.decay is not None or tokens.beta is not None):
        raise LongspanError("causal=False: a decay and a delta rule (`beta`) need an order; leave them out")
    check_initial_state(tokens, initial_state)


def _decay_problem(tokens: Tokens) -> LongspanError | None:
    """Return an error if this rank's decay is not at most 0: the state would grow with every token."""
    decay = tokens.decay
    if decay is None or decay.device.type != "cpu":
        return None
    largest = decay.detach().max().item()
    if largest <= 0:
        return None
    return LongspanError(
        f"`decay` is the logarithm of a factor and must be at most 0, its largest value is {largest:.4g}; pass "
        f"log(factor), as -exp(A) * softplus(x) is"
    )
