"""Latte by Dynamic Sequence Parallelism: frames are sharded in spatial blocks, patches in temporal ones.

All attention is local. Between a spatial and a temporal block the hidden states are switched by one all-to-all.

Shape suffixes: B batch, T frames, S patches of a frame, C channels; each of T and S whole, or this rank's part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longspan.attn.methods.dsp import dsp
from longspan.comm.mesh import SequenceSharding
from longspan.comm.reshard import gather_along
from longspan.compat.friends_api import checkpoint_function, transformer_output
from longspan.diffusion.check import Known
from longspan.diffusion.structure import Structure

NAME = "LatteTransformer3DModel"
KNOWN = Known(
    Structure({}, {}, (), {}, ("transformer_blocks", "temporal_transformer_blocks")),
    layout="BCFHW",
    arguments=frozenset(
        ("hidden_states", "timestep", "encoder_hidden_states", "encoder_attention_mask", "enable_temporal_attentions")
    ),
    time_per_token=False,
    channels_last=True,
)

FRAMES, PATCHES = 1, 2
"""Dimensions of `x_BTSC`."""


def forward(
    model: Any,
    sp: SequenceSharding,
    gather_output: bool,
    hidden_states: Tensor,
    timestep: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    enable_temporal_attentions: bool = True,
    return_dict: bool = True,
) -> Any:
    """Compute `LatteTransformer3DModel.forward` of the same inputs on every rank.

    The output is whole, or without `gather_output` this rank's patches of `[B, T, S, values of a patch]`.
    """
    batch, _, frames, height, width = hidden_states.shape
    patch: int = model.config.patch_size
    rows, columns = height // patch, width // patch
    blocks = list(model.transformer_blocks)
    attends = [PATCHES] * len(blocks)
    if enable_temporal_attentions:
        pairs = zip(model.transformer_blocks, model.temporal_transformer_blocks, strict=True)
        blocks = [block for pair in pairs for block in pair]
        attends = [PATCHES, FRAMES] * (len(blocks) // 2)
    shards = dsp(sp, attends, {FRAMES: frames, PATCHES: rows * columns})

    video = shards.shard(hidden_states.transpose(1, 2), dim=1)
    x_BTSC = model.pos_embed(video.flatten(0, 1)).unflatten(0, (batch, -1))
    conditions = {"resolution": None, "aspect_ratio": None}
    time, embedded_time = model.adaln_single(
        timestep, added_cond_kwargs=conditions, batch_size=batch, hidden_dtype=x_BTSC.dtype
    )
    text = model.caption_projection(encoder_hidden_states).repeat_interleave(max(1, x_BTSC.shape[FRAMES]), 0)
    mask = encoder_attention_mask if x_BTSC.shape[FRAMES] else None
    if mask is not None:
        mask = shards.shard(mask.unflatten(0, (batch, frames)), dim=1).flatten(0, 1)

    for i, block in enumerate(blocks):
        x_BTSC = shards.switch(x_BTSC, i)
        if attends[i] == PATCHES:
            x_BTSC = along(PATCHES, model, block, x_BTSC, text, mask, time)
        else:
            if i == 1 and frames > 1:
                x_BTSC = x_BTSC + model.temp_pos_embed.to(x_BTSC.dtype).unsqueeze(PATCHES)
            x_BTSC = along(FRAMES, model, block, x_BTSC, None, None, time)

    shift, scale = (model.scale_shift_table[None] + embedded_time[:, None]).chunk(2, dim=1)
    x_BTSC = model.norm_out(x_BTSC) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)
    sharded = shards.dims[-1]
    output = model.proj_out(x_BTSC)
    if gather_output:
        output = gather_along(output, sharded, shards.sizes[sharded], sp.group)
        pixels = output.reshape(batch, frames, rows, columns, patch, patch, model.out_channels)
        output = pixels.permute(0, 6, 1, 2, 4, 3, 5).reshape(batch, model.out_channels, frames, rows * patch, -1)
    if not return_dict:
        return (output,)
    return transformer_output(output)


def along(
    dim: int, model: Any, block: Any, x_BTSC: Tensor, text: Tensor | None, mask: Tensor | None, time: Tensor
) -> Tensor:
    """Run a block whose attention goes along one dimension; the other is part of its batch.

    A rank that holds none of the other, as with fewer frames than ranks, runs the block on zeros and drops the result.
    """
    x = x_BTSC if dim == PATCHES else x_BTSC.transpose(FRAMES, PATCHES)
    held = x.shape[1]
    if not held:
        x = torch.cat([x, x.new_zeros(x.shape[0], 1, *x.shape[2:])], 1)  # so that backward reaches the switches
    others = x.shape[1]
    arguments = (x.flatten(0, 1), None, text, mask, time.repeat_interleave(others, 0), None, None)
    if torch.is_grad_enabled() and model.gradient_checkpointing:
        checkpoint = checkpoint_function(model)
        assert checkpoint is not None
        out: Tensor = checkpoint(block, *arguments)
    else:
        out = block(*arguments)
    out = out.unflatten(0, (-1, others))[:, :held]
    return out if dim == PATCHES else out.transpose(FRAMES, PATCHES)
