"""Read how a transformer of diffusers is sharded from a small copy, and compare the sharded copy with the copy itself.

The copy has the model's class and config with few, narrow layers (`small.py`). It runs on the ranks of the sharding, in
fp32, on numbers of tokens that the ranks divide, so that every rank sees the same shapes and raises the same errors.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longspan.comm.mesh import SequenceSharding
from longspan.comm.reshard import shard_along
from longspan.core.errors import LongspanError
from longspan.diffusion.attention import shard_tokens
from longspan.diffusion.small import Draw, Inputs, failure, find_inputs, patch_of, small_config, small_copy
from longspan.diffusion.structure import Recorder, Structure, candidates, tensors_in, unknown_block
from longspan.diffusion.tokens import Tokens, places
from longspan.hf.model.pretrained import first_line

_TOLERANCE = 1e-3  # the order of sums in fp32 changes less, a token that is missing far more


@dataclass(frozen=True)
class Known:
    """What was read from the small copy."""

    structure: Structure
    layout: str  # of the latents: axes, such as "BCFHW", or "BNC" for tokens
    arguments: frozenset[str]  # of the forward, that the copy was compared with
    keeps_tokens: bool  # whether the output lists the entries of one projection of each token, so ranks may keep theirs

    def check(self, arguments: Mapping[str, Any], config: Any, ranks: int) -> None:
        """Raise for inputs that cannot be split, before anything is sent."""
        hidden = arguments.get("hidden_states")
        if not isinstance(hidden, Tensor):
            return
        if hidden.dim() != len(self.layout):
            raise LongspanError(
                f"`hidden_states` must have {len(self.layout)} dimensions ({self.layout}), got {tuple(hidden.shape)}"
            )
        n, patches = 1, {"N": 1} | dict(zip("FHW", patch_of(config), strict=True))
        for dim, axis in enumerate(self.layout):
            entries, patch = hidden.shape[dim], patches.get(axis, max(1, hidden.shape[dim]))
            if entries % patch:
                raise LongspanError(
                    f"`hidden_states` {tuple(hidden.shape)}: dimension {dim} has {entries} entries, which the patch "
                    f"size {patch} does not divide; crop or pad the video"
                )
            n *= entries // patch
        if n < ranks:
            raise LongspanError(
                f"`hidden_states` has {n} tokens, fewer than the {ranks} ranks; use at most {n} ranks, or pad it"
            )
        streams, text = {"hidden_states": n}, arguments.get("encoder_hidden_states")
        if isinstance(text, Tensor) and self.structure.has_streams:
            streams["encoder_hidden_states"] = text.shape[1]
        for kind, held in _per_token_counts(arguments, self.structure.time_per_token):
            if held not in streams.values():
                others = " and ".join(f"`{stream}` {n}" for stream, n in streams.items())
                raise LongspanError(f"{kind} has {held} tokens, {others}; give one entry per token")


def _per_token_counts(arguments: Mapping[str, Any], per_token: bool) -> Iterator[tuple[str, int]]:
    """Yield the names of inputs with one entry per token, and their entries."""
    sides: list[Any] = [arguments.get(name) for name in ("num_frames", "height", "width")]
    if all(isinstance(n, int) for n in sides) and arguments.get("video_coords") is None:
        yield "the rotary embedding", math.prod(sides)
    shapes = arguments.get("img_shapes")
    if isinstance(shapes, list) and shapes:
        of_row = shapes[0] if isinstance(shapes[0], list) else shapes[:1]
        yield "the rotary embedding", sum(math.prod(grid) for grid in of_row)
    time: Any = arguments.get("timestep")
    if per_token and _is_per_token(time):
        yield "`timestep`", time.shape[1]
    of_tokens = {name: arguments.get(name) for name in ("img_ids", "txt_ids", "image_rotary_emb")}
    for path, x in tensors_in(of_tokens).items():
        yield f"`{path}`", x.shape[-2]


def _is_per_token(time: Any) -> bool:
    return isinstance(time, Tensor) and time.dim() == 2 and time.shape[1] > 1


def draw_for(model: nn.Module, ranks: int, device: torch.device) -> Draw:
    """Return sizes of inputs that the ranks divide, and that no width of the model equals."""
    config: Any = model.config
    numbers = [x for value in config.values() for x in (value if isinstance(value, list | tuple) else [value])]
    widths = {size for p in model.parameters() for size in p.shape} | {x for x in numbers if isinstance(x, int)}
    widths |= {x // 2 for x in widths} | {x // 4 for x in widths}
    frames = 1 if any(kind in type(model).__name__ for kind in ("2D", "1D")) else 3
    frames += 2 * (frames * patch_of(config)[0] == config.get("in_channels"))  # the two must not be confused
    frames = config.get("video_length", frames)
    text = math.ceil(5 / ranks) * ranks
    while {text} & widths:
        text += ranks
    side = 4  # a square: some models ask for one
    while (side * side) % ranks or {n := side * side, m := frames * n, m + text} & widths or n <= text:
        side += 1
    return Draw(config, 2, (frames, side, side), text, torch.Generator().manual_seed(0), device)


def read(model: nn.Module, sp: SequenceSharding) -> Known:
    """Return how a model is sharded. Collective over the sequence group.

    Raises:
        LongspanError: with the reason why it cannot be; the same on every rank.
    """
    kind: Any = type(model)
    given = {name: x for name, x in model.config.items() if not name.startswith("_")}  # type: ignore[operator,union-attr]
    try:
        for layers in (2, 10**6):  # all of them, if later blocks are of another kind
            config = small_config(kind.__name__, given, 4 * math.ceil(sp.ulysses_size / 4), layers)
            key = kind, repr((sorted(config.items()), sp.parallel.degrees))
            if key not in _KNOWN:
                _KNOWN[key] = _read(small_copy(kind, config, sp.device), sp)
            if not (problem := unknown_block(model, _KNOWN[key].structure)):
                return _KNOWN[key]
        raise LongspanError(problem)
    except Exception as error:  # of any kind
        why = error if isinstance(error, LongspanError) else f"its small copy failed: {error}"
        raise LongspanError(f"{kind.__name__} of diffusers cannot be sharded: {why}") from error


_KNOWN: dict[Any, Known] = {}
"""By class, config and mesh."""


def _read(small: nn.Module, sp: SequenceSharding) -> Known:
    draw = draw_for(small, sp.size, sp.device)
    layout, inputs = find_inputs(small, draw)
    variants, time = [inputs], torch.linspace(3, 700, draw.rows * math.prod(draw.grid), device=sp.device)
    per_token = inputs | {"timestep": time.view(draw.rows, -1)}
    if "timestep" in inputs and not failure(small, per_token):
        variants.append(per_token)
    recorded = [Recorder(copy.deepcopy(small)) for _ in variants]
    for recorder, each in zip(recorded, variants, strict=True):
        with torch.no_grad(), recorder:
            recorder.model(**each, return_dict=False)
    expected = [run(copy.deepcopy(small), each) for each in variants]
    problem, tried = "", list[Structure]()
    for structure in candidates(recorded, draw.rows, draw.text):
        if structure in tried:
            continue
        tried.append(structure)
        problem = _difference(small, structure, sp, variants, expected)
        if not problem:
            keeps = len(structure.exits) == 1 and _is_arranged(small, min(structure.exits), inputs)
            return Known(structure, layout, frozenset(inputs), keeps)
    raise LongspanError(problem)


def _is_arranged(small: nn.Module, path: str, inputs: Inputs) -> bool:
    """Return whether the output has each entry of a module's output once."""
    model, found = copy.deepcopy(small), list[Tensor]()
    model.get_submodule(path).register_forward_hook(lambda module, args, x: places(x.shape, x.device))
    model.register_forward_hook(lambda module, args, output: found.append(output[0]))
    if failure(model, inputs):  # it computes with them
        return False
    expected = places(found[0].shape, found[0].device).flatten()
    return found[0].dtype == expected.dtype and torch.equal(found[0].flatten().sort().values, expected)


def run(model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """Return the output of a loss, and the gradients of all weights and inputs."""
    tensors = {key: x for key, x in inputs.items() if isinstance(x, Tensor) and x.requires_grad}
    of = dict(model.named_parameters()) | tensors
    for x in of.values():
        x.grad = None
    outputs = list(tensors_in(model(**inputs, return_dict=False)).values())
    loss = sum((x * torch.arange(x.numel(), device=x.device, dtype=x.dtype).sin().view(x.shape)).sum() for x in outputs)
    loss.backward()  # type: ignore[union-attr]
    found = {f"output{i or ''}": x.detach() for i, x in enumerate(outputs)}
    return found | {name: x.grad.clone() for name, x in of.items() if x.grad is not None}


def _difference(
    small: nn.Module,
    structure: Structure,
    sp: SequenceSharding,
    variants: list[Inputs],
    expected: list[dict[str, Tensor]],
) -> str:
    """Return how the sharded copy differs from the copy; "" if it does not."""
    model, tokens = copy.deepcopy(small), Tokens(sp)
    try:
        shard_tokens(model, structure, tokens)
        runs = list(zip(variants, expected, strict=True))
        if structure.has_streams:
            runs.append(runs[0])
        for i, (inputs, wanted) in enumerate(runs):
            if i == len(variants):  # shorter streams stay whole, which shows the order of streams
                tokens.fewest = max(tokens.sizes.lengths)
            found = run(model, at_entrance(inputs, structure, tokens))
            largest = max(float(x.abs().max()) for name, x in wanted.items() if not name.startswith("output"))
            for name, x in wanted.items():
                mine = found.get(name, torch.zeros_like(x))
                if not name.startswith("output") and sp.group is not None:
                    dist.all_reduce(mine, group=sp.group)
                    mine = mine / sp.size
                scale = max(float(x.abs().max()), 1e-2 * largest)  # a key's bias has gradient 0, up to rounding
                if not torch.allclose(mine, x, rtol=_TOLERANCE, atol=_TOLERANCE * scale):
                    by = float((mine - x).abs().max()) / scale
                    return (
                        f"tokens mix outside of its attention (`{name}` of a small copy differs by {by:.0e} when it is "
                        f"sharded)"
                    )
    except Exception as error:  # of any kind, and of the same kind on every rank
        return f"a small copy of it fails when it is sharded ({type(error).__name__}: {first_line(error)[:200]})"
    return ""


def at_entrance(inputs: Inputs, structure: Structure, tokens: Tokens) -> Inputs:
    """Return the inputs with this rank's part of time steps that are one per token."""
    if not (structure.exits and structure.time_per_token and _is_per_token(inputs.get("timestep"))):
        return inputs
    return inputs | {"timestep": shard_along(inputs["timestep"], 1, tokens.sp.group)}


def shard_target(model: Any, target: Tensor, output: Tensor) -> Tensor:
    """Return the part of a target that belongs to this rank's output of a diffusion transformer.

        model = longspan.parallelize(transformer, sp, gather_output=False)
        output = model(noisy, timestep, text).sample                     # [batch, my tokens, values of a patch]
        mine = longspan.shard_target(model, target, output)              # of the same shape
        longspan.global_mean((output - mine) ** 2, sp).backward()        # the mean over target and replicas

    Args:
        model: a model parallelized with `gather_output=False`.
        target: whole and the same on every rank, in the shape that the model returns on one device.
        output: what the model returned on this rank in its last forward.

    Raises:
        LongspanError: for another model, or for a target of another shape.
    """
    tokens = getattr(getattr(model, "longspan_state", None), "tokens", None)
    if tokens is None or tokens.kept is None:
        raise LongspanError(
            f"`model` must be a diffusion transformer parallelized with gather_output=False, got "
            f"{type(model).__name__}; the output of other models needs the whole target"
        )
    index, mine = tokens.kept
    if target.shape != index.shape or output.shape != mine:
        raise LongspanError(
            f"a target of shape {tuple(target.shape)} has no part like this rank's output {tuple(output.shape)}; give "
            f"it in the shape that the model returns on one device, {tuple(index.shape)}"
        )
    of_tokens = torch.zeros_like(target).flatten().scatter(0, index.flatten().long(), target.flatten())
    return shard_along(of_tokens.view(mine[0], -1, mine[2]), 1, tokens.sp.group)
