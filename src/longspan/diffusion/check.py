"""Read how a transformer of diffusers is sharded from a small copy, and compare the sharded copy with the copy itself.

The copy has the model's class and config with few, narrow layers (`small.py`). It runs on the ranks of the sharding, in
fp32, on numbers of tokens that the ranks divide, so that every rank sees the same shapes and raises the same errors.
"""

from __future__ import annotations

import copy
import json
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
from longspan.diffusion.attention import bind
from longspan.diffusion.small import CONFIGS, Draw, Inputs, find_layout, make_inputs, patch_of, shrink
from longspan.diffusion.structure import Recorder, Structure, block_lists, candidates, comes_first, made_of, tensors_in
from longspan.diffusion.tokens import Tokens
from longspan.hf.state import DiffusionState

_TOLERANCE = 1e-3  # the order of sums in fp32 changes less, a token that is missing far more
_LARGEST = 20_000_000  # weights of a small copy


@dataclass(frozen=True)
class Known:
    """What was read from the small copy."""

    structure: Structure
    layout: str  # of the latents: axes, such as "BCFHW", or "BNC" for tokens
    arguments: frozenset[str]  # of the forward, that the copy was compared with
    time_per_token: bool  # whether it takes a time step for each token
    channels_last: bool | None  # whether the output lists channels pixel by pixel; None: unknown

    @property
    def keeps_tokens(self) -> bool:
        """Whether ranks may keep their tokens of the output: it is one projection of each token."""
        return len(self.structure.exits) == 1 and self.channels_last is not None

    def check(self, arguments: Mapping[str, Any], config: Any, ranks: int) -> None:
        """Raise for inputs that cannot be split, before anything is sent."""
        hidden = arguments.get("hidden_states")
        if not isinstance(hidden, Tensor) or self.layout not in PATCHED:
            return
        if hidden.dim() != len(self.layout):
            raise LongspanError(
                f"`hidden_states` must have {len(self.layout)} dimensions ({self.layout}), got {tuple(hidden.shape)}"
            )
        tokens = {"hidden_states": hidden.shape[1]}
        if self.layout != "BNC":
            tokens = {"hidden_states": 1}
            for axis, patch in zip("FHW", patch_of(config), strict=True):
                dim = self.layout.find(axis)
                n = hidden.shape[dim] if dim > 0 else patch
                if n % patch:
                    raise LongspanError(
                        f"`hidden_states` {tuple(hidden.shape)}: dimension {dim} has {n} entries, which the patch size "
                        f"{patch} does not divide; crop or pad the video"
                    )
                tokens["hidden_states"] *= n // patch
        text = arguments.get("encoder_hidden_states")
        if isinstance(text, Tensor) and any(len(names) > 1 for names in self.structure.streams.values()):
            tokens["encoder_hidden_states"] = text.shape[1]
        n = tokens["hidden_states"]
        if n < ranks and self.structure.streams:
            raise LongspanError(
                f"`hidden_states` has {n} tokens, fewer than the {ranks} ranks; use at most {n} ranks, or pad it"
            )
        for kind, held in _per_token_counts(arguments, self.time_per_token):
            if held not in (n, tokens.get("encoder_hidden_states")):
                others = " and ".join(f"`{stream}` {n}" for stream, n in tokens.items())
                raise LongspanError(f"{kind} has {held} tokens, {others}; give one entry per token")


PATCHED = ("BNC", "BCHW", "BCFHW", "BFCHW")


def _per_token_counts(arguments: Mapping[str, Any], per_token: bool) -> Iterator[tuple[str, int]]:
    """Yield the names of inputs with one entry per token, and their entries."""
    sides: list[Any] = [arguments.get(name) for name in ("num_frames", "height", "width")]
    if all(isinstance(n, int) for n in sides) and arguments.get("video_coords") is None:
        yield "the rotary embedding", math.prod(sides)
    shapes = arguments.get("img_shapes")
    if isinstance(shapes, list) and shapes:
        of_row = shapes[0] if isinstance(shapes[0], list) else shapes[:1]
        yield "the rotary embedding", sum(math.prod(grid) for grid in of_row)
    time = arguments.get("timestep")
    if per_token and isinstance(time, Tensor) and time.dim() == 2 and time.shape[1] > 1:
        yield "`timestep`", time.shape[1]
    for name in ("img_ids", "txt_ids", "image_rotary_emb"):
        for _, x in tensors_in(arguments.get(name)):
            yield f"`{name}`", x.shape[-2]


def small_config(model: nn.Module, heads: int, layers: int = 2) -> dict[str, Any]:
    """Return the config of a small copy."""
    config: Any = model.config
    given = {name: x for name, x in config.items() if not name.startswith("_")}
    return shrink(given, heads, layers) | CONFIGS.get(type(model).__name__, {})


def small_copy(kind: Any, config: dict[str, Any], device: torch.device) -> nn.Module:
    """Return a small model in fp32, the same on every rank. No weight is zero, as then gradients of others would be."""
    with torch.device("meta"):
        size = sum(p.numel() for p in kind(**config).parameters())
    if size > _LARGEST:
        raise LongspanError(f"its small copy would have {size:,} weights, as its config could not be shrunk")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = kind(**config).float()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=0.1)
    return model.to(device)


def draw_for(model: nn.Module, ranks: int, device: torch.device) -> Draw:
    """Return sizes of inputs that the ranks divide, and that no width of the model equals."""
    config: Any = model.config
    numbers = [x for value in config.values() for x in (value if isinstance(value, list | tuple) else [value])]
    widths = {size for p in model.parameters() for size in p.shape} | {x for x in numbers if isinstance(x, int)}
    widths |= {x // 2 for x in widths} | {x // 4 for x in widths}
    frames = 1 if any(kind in type(model).__name__ for kind in ("2D", "1D")) else 3
    frames += 2 * (frames * patch_of(config)[0] == config.get("in_channels"))  # the two must not be confused
    text = math.ceil(5 / ranks) * ranks
    while {text} & widths:
        text += ranks
    side = 4  # a square: some models ask for one
    while (n := frames * side * side) % ranks or {n, n + text} & widths or n <= text:
        side += 1
    generator = torch.Generator().manual_seed(0)
    return Draw(config, 2, (frames, side, side), text, generator, device)


def read(model: nn.Module, sp: SequenceSharding) -> Known:
    """Return how a model is sharded. Collective over the sequence group.

    Raises:
        LongspanError: with the reason why it cannot be; the same on every rank.
    """
    name = type(model).__name__
    try:
        heads = 4 * math.ceil(sp.ulysses_size / 4)
        config = small_config(model, heads)
        key = json.dumps([config, sp.parallel.degrees], sort_keys=True, default=str)
        known = _KNOWN.setdefault(type(model), {})
        if key not in known or not _covers(known[key].structure, model):
            small = small_copy(type(model), config, sp.device)
            known[key] = _read(small, sp)
            if not _covers(known[key].structure, model):  # later blocks are of another kind
                deep = small_config(model, heads, layers=10**6)
                known[key] = _read(small_copy(type(model), deep, sp.device), sp)
        return known[key]
    except LongspanError as error:
        raise LongspanError(f"{name} of diffusers cannot be sharded: {error}") from error
    except Exception as error:  # of any kind
        raise LongspanError(f"{name} of diffusers cannot be sharded: its small copy failed: {error}") from error


def _covers(structure: Structure, model: nn.Module) -> bool:
    lists = block_lists(model)
    return all(made_of(block) in kinds for path, kinds in structure.blocks.items() for block in lists[path])


_KNOWN: dict[type, dict[str, Known]] = {}
"""By class, and by config and mesh."""


def _read(small: nn.Module, sp: SequenceSharding) -> Known:
    draw = draw_for(small, sp.size, sp.device)

    def fresh(layout: str) -> Inputs:
        draw.generator.manual_seed(0)
        return make_inputs(type(small), draw, layout)

    layout = find_layout(small, fresh)
    variants = [fresh(layout)]
    per_token = _per_token(small, draw, variants[0])
    if per_token is not None:
        variants.append(per_token)
    recorded = []
    for inputs in variants:
        with torch.no_grad(), Recorder(small, draw.rows) as recorder:
            small(**inputs, return_dict=False)
        recorded.append(recorder)
    expected = [run(copy.deepcopy(small), inputs) for inputs in variants]
    problem = ""

    def is_first(path: str, name: str) -> bool:
        with torch.no_grad(), Recorder(small, draw.rows, (path, name)) as disturbed:
            small(**variants[0], return_dict=False)
        return comes_first(recorded[0], disturbed)

    for structure in candidates(recorded, draw.text, is_first):
        problem = "" if sp.size == 1 else _difference(small, structure, sp, variants, expected)
        if not problem:
            return Known(
                structure,
                layout,
                frozenset(variants[0]),
                per_token is not None,
                _channels_last(small, structure, layout, variants[0]),
            )
    raise LongspanError(problem)


def _per_token(small: nn.Module, draw: Draw, inputs: Inputs) -> Inputs | None:
    """Return the inputs with a time step for each token, if the model takes them."""
    tokens = math.prod(draw.grid)
    time = inputs.get("timestep")
    if time is None:
        return None
    inputs = inputs | {"timestep": torch.linspace(3, 700, draw.rows * tokens, device=draw.device).view(draw.rows, -1)}
    try:
        with torch.no_grad():
            small(**inputs, return_dict=False)
    except Exception:
        return None
    return inputs


def _channels_last(small: nn.Module, known: Structure, layout: str, inputs: Inputs) -> bool | None:
    """Return in which order the last projection lists the values of a token; None if neither is the output's."""
    tokens: list[Tensor] = []
    if len(known.exits) != 1 or layout not in PATCHED:
        return None
    (path,) = known.exits
    handle = small.get_submodule(path).register_forward_hook(lambda module, args, output: tokens.append(output))
    with torch.no_grad():
        output = small(**inputs, return_dict=False)[0]
    handle.remove()
    for order in (True, False):
        try:
            if torch.equal(to_tokens(output, layout, patch_of(small.config), order), tokens[-1]):
                return order
        except RuntimeError:
            continue
    return None


def to_tokens(x: Tensor, layout: str, patch: tuple[int, int, int], channels_last: bool | None) -> Tensor:
    """Return `[B, tokens, values]` of pixels, as the model's last projection; tokens are returned as they are."""
    if layout == "BNC":
        return x
    x = x.movedim(layout.index("C"), -1)
    x = x if "F" in layout else x.unsqueeze(1)
    for dim, side in zip((1, 3, 5), patch, strict=True):
        x = x.unflatten(dim, (-1, side))
    values = (2, 4, 6, 7) if channels_last else (7, 2, 4, 6)
    return x.permute(0, 1, 3, 5, *values).flatten(4).flatten(1, 3)


def run(model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """Return the output of a loss, and the gradients of all weights and inputs."""
    tensors = {key: x for key, x in inputs.items() if isinstance(x, Tensor) and x.requires_grad}
    for x in (*tensors.values(), *model.parameters()):
        x.grad = None
    outputs = [x for _, x in tensors_in(model(**inputs, return_dict=False))]
    loss = sum((x * torch.arange(x.numel(), device=x.device, dtype=x.dtype).sin().view(x.shape)).sum() for x in outputs)
    loss.backward()  # type: ignore[union-attr]
    found = {f"output {i}": x.detach() for i, x in enumerate(outputs)}
    grads = {name: p.grad for name, p in model.named_parameters()} | {key: x.grad for key, x in tensors.items()}
    return found | {name: grad.clone() for name, grad in grads.items() if grad is not None}


def _difference(
    small: nn.Module,
    structure: Structure,
    sp: SequenceSharding,
    variants: list[Inputs],
    expected: list[dict[str, Tensor]],
) -> str:
    """Return how the sharded copy differs from the copy; "" if it does not."""
    model = copy.deepcopy(small)
    tokens = Tokens(sp)
    try:
        shard_tokens(model, structure, tokens)
        for inputs, wanted in zip(variants, expected, strict=True):
            found = run(model, at_entrance(inputs, structure, tokens, len(variants) > 1))
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
        return (
            f"a small copy of it fails when it is sharded ({type(error).__name__}: {str(error).splitlines()[0][:200]})"
        )
    return ""


def shard_tokens(model: nn.Module, structure: Structure, tokens: Tokens) -> int:
    """Hook splits, joins and attention into a model; return the number of its attention modules."""
    attention = tokens.install(model, structure)
    for path, module, calls in attention:
        bind(module, path, calls, tokens)
    return len(attention)


def at_entrance(inputs: Inputs, structure: Structure, tokens: Tokens, time_per_token: bool) -> Inputs:
    """Return the inputs with this rank's part of time steps that are one per token."""
    time = inputs.get("timestep")
    if (
        not (structure.exits and time_per_token)
        or not isinstance(time, Tensor)
        or time.dim() != 2
        or time.shape[1] == 1
    ):
        return inputs
    return inputs | {"timestep": shard_along(time, 1, tokens.sp.group)}


def shard_target(model: Any, target: Tensor, output: Tensor) -> Tensor:
    """Return the part of a target that belongs to this rank's output of a diffusion transformer.

        model = longspan.parallelize(transformer, sp, gather_output=False)
        output = model(noisy, timestep, text).sample                     # [batch, my tokens, values of a patch]
        mine = longspan.shard_target(model, target, output)              # of the same shape
        longspan.global_mean((output - mine) ** 2, sp).backward()        # the mean over target and replicas

    Args:
        model: a model parallelized with `gather_output=False`.
        target: whole and the same on every rank, in the shape that the model returns on one device.
        output: what the model returned on this rank.

    Raises:
        LongspanError: for another model, or for a target of another shape.
    """
    state = getattr(model, "longspan_state", None)
    known = state.known if isinstance(state, DiffusionState) else None
    if known is None:
        raise LongspanError(
            f"`model` must be a diffusion transformer parallelized with gather_output=False, got "
            f"{type(model).__name__}; the output of other models needs the whole target"
        )
    assert isinstance(state, DiffusionState)
    whole = to_tokens(target, known.layout, patch_of(model.config), known.channels_last)
    if output.dim() == 4:  # Latte's frames and patches
        whole = whole.unflatten(1, (target.shape[2], -1))
    for dim in range(1, whole.dim() - 1):
        mine = shard_along(whole, dim, state.sp.group)
        if mine.shape == output.shape:
            return mine
    raise LongspanError(
        f"a target of shape {tuple(target.shape)} has no part like this rank's output {tuple(output.shape)}; give it "
        f"in the shape that the model returns on one device"
    )
