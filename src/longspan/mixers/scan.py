"""A scan whose state is as large as a token: RG-LRU's and RWKV's, in plain torch.

transformers loops over tokens. This cuts T tokens into sqrt(T) chunks, and loops over the tokens of a chunk, for all
chunks at once, then over the chunks.

Shape suffixes: B batch, N chunks, C tokens of a chunk, H heads (channels), K key dim, V value dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.mixers.mixer import Local, Tokens


@dataclass(frozen=True)
class Scan:
    """The scan as a `Mixer`: `state = decay * state + v`, so `decay` is a factor, not its logarithm, and K is 1."""

    before: bool = False  # whether a token's output is the state before it, not the one after it
    causal: bool = True

    def columns(self, tokens: Tokens) -> int:
        return 1

    def local(self, tokens: Tokens, state: Tensor | None, receives: bool) -> Local:
        assert tokens.decay is not None
        count, dtype = tokens.v.shape[1], tokens.state_dtype
        size = math.isqrt(count - 1) + 1
        factors_BNCH = F.pad(tokens.decay.to(dtype), (0, 0, 0, -count % size), value=1.0).unflatten(1, (-1, size))
        v_BNCHV = F.pad(tokens.v.to(dtype), (0, 0, 0, 0, 0, -count % size)).unflatten(1, (-1, size))
        kept_BNCH = F.pad(factors_BNCH.double().cumprod(2), (0, 0, 1, 0), value=1.0)
        of_chunk_BNHV = [torch.zeros_like(v_BNCHV[:, :, 0])]  # after each of its tokens, from zero
        for factor_BNH, v_BNHV in zip(factors_BNCH.unbind(2), v_BNCHV.unbind(2), strict=True):
            of_chunk_BNHV.append(v_BNHV + factor_BNH.unsqueeze(3) * of_chunk_BNHV[-1])
        kept_BNH = F.pad(kept_BNCH[:, :, -1].cumprod(1), (0, 0, 1, 0), value=1.0).to(dtype)
        kept_BNCHV = kept_BNCH.to(dtype).unsqueeze(4)
        starts_BHV = [torch.zeros_like(v_BNCHV[:, 0, 0]) if state is None else state[:, :, 0]]
        for added_BHV, kept_BHV in zip(of_chunk_BNHV[-1].unbind(1), kept_BNCHV[:, :, -1].unbind(1), strict=True):
            starts_BHV.append(added_BHV + kept_BHV * starts_BHV[-1])
        read = slice(0, -1) if self.before else slice(1, None)

        def finish(entered_BHKV: Tensor | None) -> Tensor:
            starts_BNHV = torch.stack(starts_BHV[:-1], 1)
            if entered_BHKV is not None:
                starts_BNHV = starts_BNHV + kept_BNH[:, :-1].unsqueeze(3) * entered_BHKV.transpose(1, 2)
            out_BNCHV = torch.stack(of_chunk_BNHV[read], 2) + kept_BNCHV[:, :, read] * starts_BNHV.unsqueeze(2)
            return out_BNCHV.flatten(1, 2)[:, :count]

        return Local(starts_BHV[-1].unsqueeze(2), kept_BNH[:, -1, :, None, None] if receives else None, finish)
