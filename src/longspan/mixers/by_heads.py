"""A recurrent layer by heads: all-to-all, the whole sequence on my heads, all-to-all back (Ulysses).

It sends all tokens, where state passing sends one state per rank, and keeps no more ranks busy than there are heads.
Shape suffixes: B batch, S tokens of the sequence in rank order, H value heads, h those of this rank, W packed dims.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.comm.collectives import all_gather
from longspan.comm.mesh import group_name
from longspan.comm.reshard import heads_to_seq, seq_to_heads, shard_sizes
from longspan.core.layout import Layout
from longspan.mixers.chunk_states import pass_states
from longspan.mixers.fragments import fragment_table
from longspan.mixers.mixer import Mixer, Tokens
from longspan.mixers.state_passing import zero_of

if TYPE_CHECKING:
    from longspan.attn.segments import Segments
    from longspan.comm.mesh import SequenceSharding


def run_by_heads(
    mixer: Mixer,
    tokens: Tokens,
    sp: SequenceSharding,
    length: int,
    segments: Segments | None,
    initial_state: Tensor | None,
    return_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """Run a recurrent layer on my tokens, computed by heads; see `run_mixer`."""
    assert sp.group is not None
    (heads, K, V), batch = tokens.state_shape, tokens.v.shape[0]
    repeats = heads // tokens.k.shape[2]
    q, k = (x.repeat_interleave(repeats, 2) if repeats > 1 else x for x in (tokens.q, tokens.k))
    spans = [span for rank in range(sp.size) for span in sp.layout.padded_spans(length, rank)]
    places = torch.cat([torch.arange(*span, device=q.device) for span in spans])  # of the tokens in rank order

    def by_heads(xs_BLHD: list[Tensor]) -> list[Tensor]:
        packed_BShW = seq_to_heads(torch.cat(xs_BLHD, -1), sp.group).index_select(1, places.argsort()[:length])
        return list(packed_BShW.split([x.shape[3] for x in xs_BLHD], -1))

    q, k, v = by_heads([q, k, tokens.v])
    gates = [x if x.dim() == 4 else x.unsqueeze(-1) for x in (tokens.decay, tokens.beta) if x is not None]
    received = iter(by_heads(gates) if gates else [])
    decay = None if tokens.decay is None else next(received)
    beta = None if tokens.beta is None else next(received).squeeze(-1)
    if decay is not None and tokens.decay is not None and tokens.decay.dim() == 3:
        decay = decay.squeeze(-1)

    # All tokens of my heads, as on one device.
    sizes = shard_sizes(heads, sp.size)
    first, mine = sum(sizes[: sp.rank]), sizes[sp.rank]
    link = zero_of(q, k, v, decay, beta, initial_state)  # a rank without heads takes part in each backward
    out, state = v + link, v.new_zeros(batch, 0, K, V, dtype=tokens.state_dtype) + link
    if mine:
        if initial_state is not None:
            initial_state = initial_state[:, first : first + mine]
        table, gathered = fragment_table(Layout(), 0, length, batch, segments), Tokens(q, k, v, decay, beta)
        out, final = pass_states(mixer, gathered, table, None, initial_state=initial_state, return_state=return_state)
        state = state if final is None else final
    out_BShV = F.pad(out, (0, 0, 0, 0, 0, len(places) - length)).index_select(1, places)
    out = heads_to_seq(out_BShV, sp.group, heads=heads)
    if not return_state:
        return out, None
    states = all_gather(F.pad(state, (0, 0, 0, 0, 0, sizes[0] - mine)).unsqueeze(0), group_name(sp.group))
    return out, torch.cat([x[:, :n] for x, n in zip(states, sizes, strict=True)], 1)
