"""The part of a target that belongs to a rank's output, with `parallelize(..., gather_output=False)`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from longspan.comm.arguments import check_tensor
from longspan.comm.reshard import shard_along
from longspan.core.errors import LongspanError
from longspan.core.validation import checked_call
from longspan.hf.diffusion.families import Family
from longspan.hf.state import DiffusionState


@checked_call()
def shard_target(model: Any, target: Tensor, output: Tensor) -> Tensor:
    """Return the part of a target that belongs to this rank's output of a diffusion transformer.

        model = longspan.parallelize(transformer, sp, gather_output=False)
        output = model(noisy, timestep, text).sample                     # [batch, my tokens, values of a patch]
        mine = longspan.shard_target(model, target, output)              # of the same shape
        ((output - mine) ** 2).sum().div(target.numel()).backward()      # my share of the mean over the whole target

    Args:
        model: a model parallelized with `gather_output=False`.
        target: whole and the same on every rank, in the shape that the model returns on one device.
        output: what the model returned on this rank.

    Raises:
        LongspanError: for another model, or for a target of another shape.
    """
    state = getattr(model, "longspan_state", None)
    family = state.family if isinstance(state, DiffusionState) else None
    if family is None:
        raise LongspanError(
            f"`model` must be a diffusion transformer parallelized with gather_output=False, got "
            f"{type(model).__name__}; the output of other models needs the whole target"
        )
    assert isinstance(state, DiffusionState)
    check_tensor("target", target)
    check_tensor("output", output)
    whole, group = _to_tokens(target, family, model.config), state.sp.group
    for dim in range(1, whole.dim() - 1):
        mine = shard_along(whole, dim, group)
        if mine.shape == output.shape:
            return mine
    raise LongspanError(
        f"a target of shape {tuple(target.shape)} has no part like this rank's output {tuple(output.shape)}; give it "
        f"in the shape that the model returns on one device"
    )


def _to_tokens(x: Tensor, family: Family, config: Any) -> Tensor:
    """Return `[B, tokens, values]` of pixels, as the model's last projection; for Latte `[B, frames, patches, values]`.

    Tokens are returned as they are.
    """
    patches = family.patches(config)
    if not patches:
        return x
    if x.dim() != 5 or any(x.shape[dim] % patch for dim, patch in patches.items()):
        raise LongspanError(f"a target of shape {tuple(x.shape)} has no patches of {tuple(patches.values())} pixels")
    channels = next(dim for dim in range(1, 5) if dim not in patches)
    x = x.movedim(channels, -1)  # [B, frames, height, width, C]
    for dim, patch in zip((1, 3, 5), patches.values(), strict=True):
        x = x.unflatten(dim, (-1, patch))
    values = (2, 4, 6, 7) if family.channels_last else (7, 2, 4, 6)
    x = x.permute(0, 1, 3, 5, *values).flatten(4)
    return x.flatten(1, 3) if family.attention else x.flatten(2, 3)
