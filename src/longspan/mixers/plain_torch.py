"""Linear attention of one fragment in plain torch, chunk by chunk, safe for any decay at or below 0: a `Mixer`.

With decay `d_t` (in log space) and delta rule `beta_t`, the state and the output are

    S_t = (I - beta_t k_t k_t^T) Diag(exp(d_t)) S_{t-1} + beta_t k_t v_t^T        o_t = q_t . S_t

Within a chunk this is three triangular products ("UT transform": Yang et al., Gated DeltaNet, arXiv:2412.06464; KDA,
arXiv:2510.26692); from chunk to chunk it is a scan of the state.

Decays are summed in fp64, and only differences `b_t - b_s <= 0` are exponentiated: a factor `exp(-b_s)` alone would
overflow. Zero tokens (k = 0, decay 0, beta 0) leave the state as it is, so a fragment is filled up with them.

Shape suffixes: B batch, T tokens, H heads, K key dim, V value dim, N chunks, C tokens of a chunk, D is K or 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.mixers.mixer import Local, Tokens

CHUNK = 64
_DIRECT = 8  # tokens for which decays per key are multiplied pair by pair


class _Chunks(NamedTuple):
    """A fragment, cut into chunks."""

    # What a chunk multiplies the state by, `[N, B, H, K, K]`, or factors `[N, B, H, 1 or K, 1]`; None for 1.
    step: Tensor | None
    added: Tensor  # what it adds, `[N, B, H, K, V]`
    end: Tensor | None  # the logarithm of its factors, fp64 `[N, B, H, 1, 1 or K]`; None for other steps
    # Returns the output `[B, T, H, V]` for the states before every chunk, `[N, B, H, K, V]`.
    output: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LinearAttention:
    """The mixer in plain torch, in fp32 or fp64."""

    causal: bool = True

    def columns(self, tokens: Tokens) -> int:
        """Return 0 without decay, 1 with it, and the key dim with the delta rule."""
        if tokens.beta is not None:
            return tokens.k.shape[3]
        return int(tokens.decay is not None)

    def _cut(self, tokens: Tokens) -> _Chunks:
        """Cut one fragment into chunks."""
        q, k, v, beta = self._converted(tokens)
        decay = tokens.decay
        if decay is not None:
            # Beyond this a factor is 0 in any dtype, and sums of decays keep their last digits.
            decay = decay.double().clamp(min=-800.0)
            decay = decay.unsqueeze(-1) if decay.dim() == 3 else decay
        return _chunked(q, k, v, decay, beta)

    def local(self, tokens: Tokens, state: Tensor | None, receives: bool) -> Local:
        """Compute one fragment."""
        if state is None:
            state = tokens.v.new_zeros(tokens.v.shape[0], *tokens.state_shape, dtype=tokens.state_dtype)
        if self.causal:
            return _local_of(self._cut(tokens), state, receives)
        q_BHTK, k_BHTK, v_BHTV = (x.transpose(1, 2) for x in self._converted(tokens)[:3])
        total = state + k_BHTK.mT @ v_BHTV

        def finish(other_BHKV: Tensor | None) -> Tensor:
            return (q_BHTK @ (total if other_BHKV is None else total + other_BHKV)).transpose(1, 2)

        return Local(total, None, finish)

    @staticmethod
    def _converted(tokens: Tokens) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return q, k, v and beta in the state's dtype, q and k for every value head."""
        dtype, repeats = tokens.state_dtype, tokens.v.shape[2] // tokens.q.shape[2]
        q, k, v = tokens.q.to(dtype), tokens.k.to(dtype), tokens.v.to(dtype)
        if repeats > 1:
            q, k = q.repeat_interleave(repeats, 2), k.repeat_interleave(repeats, 2)
        return q, k, v, None if tokens.beta is None else tokens.beta.to(dtype)


def _chunked(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, decay_BTHD: Tensor | None, beta_BTH: Tensor | None
) -> _Chunks:
    """Cut one fragment into chunks, and compute what is independent of the state.

    Args:
        q_BTHK: queries; all tensors have one dtype, fp32 or fp64.
        k_BTHK: keys.
        v_BTHV: values.
        decay_BTHD: fp64, at most 0; D is K, or 1 for a decay per head.
        beta_BTH: strength of the delta rule; None for plain linear attention.
    """
    (tokens, _, K), V = q_BTHK.shape[1:], v_BTHV.shape[3]
    size = min(CHUNK, 1 << (tokens - 1).bit_length())

    def cut(x_BTHD: Tensor) -> Tensor:
        x_BNCHD = F.pad(x_BTHD, (0, 0, 0, 0, 0, -tokens % size)).unflatten(1, (-1, size))
        x_NBHCD: Tensor = x_BNCHD.permute(1, 0, 3, 2, 4).contiguous()
        return x_NBHCD

    q, k, v = cut(q_BTHK), cut(k_BTHK), cut(v_BTHV)
    b = None if decay_BTHD is None else cut(decay_BTHD).cumsum(-2)
    q_in, k_in, k_out, kept, end = q, k, k, None, None
    if b is not None:
        until_now, end = b.to(q.dtype).exp(), b[..., -1:, :]
        q_in, k_in, k_out = q * until_now, k * until_now, k * (end - b).to(q.dtype).exp()
        kept = until_now[..., -1:, :].mT
    if beta_BTH is None:
        step, added, written, erased = kept, k_out.mT @ v, v, None
    else:
        beta = cut(beta_BTH.unsqueeze(-1))
        # Solve for what each token writes: `written - erased . S`, where S is the state before the chunk.
        both = torch.linalg.solve_triangular(
            _pairs(beta * k, k, b), torch.cat([beta * v, beta * k_in], -1), upper=False, unitriangular=True
        )
        written, erased = both.split([V, K], -1)
        eye = torch.eye(K, dtype=k.dtype, device=k.device)
        step, added = (eye if kept is None else kept * eye) - k_out.mT @ erased, k_out.mT @ written

    def output(before_NBHKV: Tensor) -> Tensor:
        values = written if erased is None else written - erased @ before_NBHKV
        out_NBHCV = _pairs(q, k, b) @ values + q_in @ before_NBHKV
        return out_NBHCV.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :tokens]

    return _Chunks(step, added, None if beta_BTH is not None else end, output)


def _pairs(q: Tensor, k: Tensor, b: Tensor | None) -> Tensor:
    """Return `[..., C, C]`: for s <= t the sum over keys of `q_t k_s exp(b_t - b_s)`, otherwise 0."""
    size = q.shape[-2]
    if b is None:
        return (q @ k.mT).tril()
    if b.shape[-1] == 1:
        return q @ k.mT * _decays((b - b.mT).to(q.dtype))
    if size <= _DIRECT:
        decays = _decays((b.mT.unsqueeze(-1) - b.mT.unsqueeze(-2)).to(q.dtype))
        return torch.einsum("...tk,...sk,...kts->...ts", q, k, decays)
    # Queries of the second half see the first half's keys through the middle, which keeps both exponents below 0.
    half = size // 2
    q, k, b = (x.unflatten(-2, (2, half)) for x in (q, k, b))
    middle = b[..., 0, -1:, :]
    later = q[..., 1, :, :] * (b[..., 1, :, :] - middle).to(q.dtype).exp()
    earlier = k[..., 0, :, :] * (middle - b[..., 0, :, :]).to(q.dtype).exp()
    low = later @ earlier.mT
    first, second = _pairs(q, k, b).unbind(-3)
    return torch.cat([torch.cat([first, torch.zeros_like(low)], -1), torch.cat([low, second], -1)], -2)


def _decays(difference: Tensor) -> Tensor:
    """Return `exp(b_t - b_s)` for s <= t, otherwise 0; `difference` is `[..., t, s]`."""
    size = difference.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=difference.device).triu(1)
    return difference.masked_fill(later, -torch.inf).exp()


def _local_of(chunks: _Chunks, start_BHKV: Tensor, receives: bool) -> Local:
    step, added, end, output = chunks
    V, K = added.shape[-1], added.shape[-2]
    if receives and step is not None and end is None:  # further columns of the state, from the identity: the transition
        eye = torch.eye(K, dtype=added.dtype, device=added.device).expand(*start_BHKV.shape[:2], K, K)
        start_BHKV, added = torch.cat([start_BHKV, eye], -1), F.pad(added, (0, K))
    states: tuple[Tensor, Tensor] = _Scan.apply(step, added, start_BHKV)  # type: ignore[no-untyped-call]
    (before, since), (final, transition) = (x.tensor_split([V], -1) for x in states)
    if receives and end is not None:
        until = end.cumsum(0)
        since = (until - end).to(added.dtype).exp().mT
        transition = until[-1].to(added.dtype).exp().mT.expand(-1, -1, K, 1)

    def finish(entered_BHKV: Tensor | None) -> Tensor:
        if entered_BHKV is None:
            return output(before)
        if step is None:
            return output(before + entered_BHKV)
        return output(before + (since * entered_BHKV if end is not None else since @ entered_BHKV))

    return Local(final, transition if receives and step is not None else None, finish)


class _Scan(torch.autograd.Function):
    """Return the states before every chunk, and the one after all: `state = step . state + added`.

    Autograd of the loop would save each state, and allocate a gradient of the size of `step`, once per chunk.
    """

    @staticmethod
    def forward(ctx: Any, step: Tensor | None, added: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        before, after = torch.empty_like(added), torch.empty_like(start)
        before[0] = start
        for n in range(len(added)):
            _advance(step, added, before, n, before[n + 1] if n + 1 < len(added) else after)
        ctx.save_for_backward(step, before)
        return before, after

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dbefore: Tensor, dafter: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        step, before = ctx.saved_tensors
        transposed = None if step is None else step if step.shape[-1] == 1 else step.mT
        dstates, dstart = torch.empty_like(before), torch.empty_like(before[0])  # of the states after the chunks
        dstates[-1] = dafter
        for n in reversed(range(len(before))):
            _advance(transposed, dbefore, dstates, n, dstates[n - 1] if n else dstart)
        dstep = None
        if ctx.needs_input_grad[0]:
            dstep = (dstates * before).sum_to_size(step.shape) if step.shape[-1] == 1 else dstates @ before.mT
        return dstep, dstates, dstart


def _advance(step: Tensor | None, added: Tensor, states: Tensor, n: int, out: Tensor) -> None:
    """Write `step . state + added` of chunk n to `out`."""
    if step is None:
        torch.add(states[n], added[n], out=out)
    elif step.shape[-1] == 1:
        torch.addcmul(added[n], step[n], states[n], out=out)
    else:
        flat = (x.flatten(0, 1) for x in (added[n], step[n], states[n]))
        torch.baddbmm(*flat, out=out.flatten(0, 1))
        # A product of many steps becomes subnormal, and a CPU takes ten times as long then.
        out.copy_(F.hardshrink(out, 1e8 * torch.finfo(out.dtype).tiny))
