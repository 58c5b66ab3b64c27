"""A small copy of a transformer of diffusers, from its config, and random inputs, from the signature of its forward.

`parallelize` compares the copy with itself over the ranks; `verify` and the tests use the inputs of any size.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from longspan.core.errors import LongspanError

Inputs = dict[str, Any]

_HEADS = r"num(_cross)?(_attention)?_heads|n_heads|dit_heads"
_HEAD_DIM = ("attention_head_dim", "head_dim", "linear_head_dim", "cross_attention_head_dim")
_WIDTH = ("hidden_size", "dim", "model_dim", "dit_dim", "embed_dim", "hidden_dim")
_AXES = ("axes_dims_rope", "rope_axes_dim", "axes_dims", "axes_dim_rope", "rope_dim_list", "axes_dim", "rope_dim")
_TEXT = (
    "joint_attention_dim", "text_dim", "text_embed_dim", "caption_channels", "context_in_dim", "cap_feat_dim",
    "in_text_dim", "text_hidden_dim", "text_in_dim", "cond_token_dim", "cross_attention_input_dim",
    "cross_attention_dim", "dit_text_dim", "hidden_size",
)  # fmt: skip
_CHANNELS = ("audio_acoustic_hidden_dim", "in_channels", "in_visual_dim", "io_channels", "latent_dim")
_LARGEST = 20_000_000  # weights of a small copy


def first_of(config: Any, names: Iterable[str], default: Any = None) -> Any:
    """Return the first of these entries that a config has."""
    return next((config[name] for name in names if config.get(name) is not None), default)


def patch_of(config: Any) -> tuple[int, int, int]:
    """Return the patch size along frames, height and width."""
    p = first_of(config, ("patch_size", "all_patch_size", "latent_patch_size"), 1)
    p = tuple(p) if isinstance(p, tuple | list) else (p,)
    return (p[0], p[1], p[2]) if len(p) == 3 else (first_of(config, ("patch_size_t",), 1), p[0], p[-1])


# ---------------------------------------------------------------------------------------------------------------------
# A small config.

_CONFIGS: dict[str, dict[str, Any]] = {
    "WanVACETransformer3DModel": {"vace_layers": [0]},
    "PRXTransformer2DModel": {"axes_dim": (6, 6)},
}
"""What differs in a small copy, by class."""


def small_config(kind: str, config: dict[str, Any], heads: int = 4, layers: int = 2) -> dict[str, Any]:
    """Return a config of the same structure with few heads and layers, and narrow."""
    old_heads: dict[str, int] = {}  # of each stream, such as "audio_"
    for name, value in config.items():
        if value and (found := re.fullmatch(rf"(\w+_)??({_HEADS})", name)):
            old_heads.setdefault(found[1] or "", value)
    widths = set[int]()
    for prefix in ("", *old_heads):
        given, head_dim = (first_of(config, [prefix + name for name in names]) for names in (_WIDTH, _HEAD_DIM))
        widths.add(max(given or old_heads.get(prefix, 1) * (head_dim or 0), 16))
    axes = first_of(config, _AXES)
    head_dim = 16 if isinstance(axes, tuple | list) and len(axes) == 4 else 12  # even parts

    def size(name: str, value: int) -> int:
        if re.fullmatch(rf"(\w+_)??({_HEADS})", name):
            return heads
        if grouped := re.fullmatch(r"(\w+_)??(num_key_value|num_kv|n_kv)(_attention)?_heads", name):
            return max(1, heads * value // old_heads[grouped[1] or ""])
        if name.endswith(_HEAD_DIM):
            return head_dim
        if value and (fits := [width for width in widths - {16} if value % width == 0]):
            return value // max(fits) * heads * head_dim
        if re.search(r"(layers|depth|blocks)$", name):
            return min(value, layers)
        if name.endswith(_TEXT) or (name.endswith("_dim") and value > 256):
            return 16
        return value if value <= 256 else 24

    def entry(name: str, value: Any) -> Any:
        if name in _AXES and isinstance(value, tuple | list):
            return type(value)([head_dim // len(value)] * len(value))
        return size(name, value) if type(value) is int else value

    return {name: entry(name, value) for name, value in config.items()} | _CONFIGS.get(kind, {})


def small_copy(kind: Any, config: dict[str, Any], device: torch.device) -> Any:
    """Return a small model in fp32, the same on every rank."""
    with torch.device("meta"):
        size = sum(p.numel() for p in kind(**config).parameters())
    if size > _LARGEST:
        raise LongspanError(f"its small copy would have {size:,} weights, as its config could not be shrunk")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return without_zeros(kind(**config).float(), 0.1).to(device)


@torch.no_grad()
def without_zeros(model: Any, scale: float) -> Any:
    """Return a model with noise added to its weights, of which none is zero then, or gradients of others would be."""
    for p in model.parameters():
        p.add_(torch.randn_like(p), alpha=scale)
    return model


# ---------------------------------------------------------------------------------------------------------------------
# Inputs.


@dataclass(frozen=True)
class Draw:
    """Sizes and generator of random inputs."""

    config: Any  # the model's
    rows: int  # videos or images
    grid: tuple[int, int, int]  # frames, height and width in tokens; an image has one frame
    text: int  # tokens of the text
    generator: torch.Generator  # on the CPU, so that all devices have the same inputs
    device: torch.device
    dtype: torch.dtype = torch.float32
    layout: str = "BNC"  # of the latents, as pixels or tokens: "BCFHW", "BFCHW", "BCHW", "BNC", ...

    def normal(self, *shape: int, trained: bool = True) -> Tensor:
        x = torch.randn(*shape, generator=self.generator, dtype=self.dtype)
        return x.to(self.device).requires_grad_(trained)

    def of(self, *names: str, default: Any = None) -> Any:
        """Return the first of these entries that the config has."""
        return first_of(self.config, names, default)

    def by_row(self, *shape: int, width: Iterable[str]) -> Tensor | None:
        """Return `[rows, *shape, width]`, of the first of these entries that the config has; None if it has none."""
        size = self.of(*width)
        return None if size is None else self.normal(self.rows, *shape, size)

    @property
    def tokens(self) -> int:
        return math.prod(self.grid)

    @property
    def pixels(self) -> tuple[int, ...]:
        return tuple(n * p for n, p in zip(self.grid, patch_of(self.config), strict=True))

    def mask(self) -> Tensor:
        """The text's; the first row has padding, of which more than one of several ranks have a part."""
        mask = torch.ones(self.rows, self.text, dtype=torch.bool, device=self.device)
        mask[0, max(1, self.text // 2 - 1) :] = False
        return mask

    def ids(self, *grid: int) -> Tensor:
        axes = self.of(*_AXES, default=(1, 1, 1))
        width = len(axes) if isinstance(axes, tuple | list) else 3
        ids = torch.stack(torch.meshgrid(*map(torch.arange, grid), indexing="ij"), -1).flatten(0, -2)
        return torch.nn.functional.pad(ids, (0, width - 3)).to(self.device, torch.float32)

    def numbers(self, low: float, high: float) -> Tensor:
        return torch.linspace(low, high, self.rows, device=self.device, dtype=self.dtype)

    def constant(self, *values: float) -> Tensor:
        return torch.tensor([values], device=self.device, dtype=self.dtype).expand(self.rows, -1)


def _latents(draw: Draw) -> Tensor:
    channels = draw.of(*_CHANNELS)
    if draw.of("visual_cond"):  # a condition and its mask
        channels = 2 * channels + 1
    n = math.prod(draw.grid if "F" in draw.layout or draw.layout == "BNC" else draw.grid[1:])
    frames, height, width = draw.pixels
    frames = draw.of("video_length", default=frames)
    sizes = {"B": draw.rows, "C": channels, "N": n, "F": frames, "H": height, "W": width}
    return draw.normal(*(sizes[axis] for axis in draw.layout))


def _text(draw: Draw) -> Tensor | None:
    # Models that read an image beside a text of 512 tokens expect both in one tensor.
    tokens = draw.text if draw.of("image_dim") is None else 512
    layers = [] if draw.of("num_text_layers") is None else [draw.of("num_text_layers")]
    return draw.normal(draw.rows, tokens, *layers, draw.of(*_TEXT))


def _image(draw: Draw) -> Tensor | None:
    """Return the tokens of an image, of two images where the model embeds their positions."""
    width, places = draw.of("image_dim"), draw.of("pos_embed_seq_len")
    if width is None:
        return None
    return draw.normal(2 * draw.rows, places // 2, width) if places else draw.normal(draw.rows, 3, width)


def _rotary(draw: Draw) -> Any:
    if not draw.of("use_rotary_positional_embeddings"):
        return None
    angles = draw.normal(draw.tokens, draw.of(*_HEAD_DIM), trained=False)
    return angles.cos(), angles.sin()


def _by_frame(draw: Draw) -> Tensor:
    return draw.numbers(3, 700)[:, None].expand(-1, draw.grid[0])


RULES: dict[str, Callable[[Draw], Any]] = {
    "hidden_states": _latents,
    "encoder_hidden_states": _text,
    "timestep": lambda draw: draw.numbers(3, 700),
    "pooled_projections": lambda draw: draw.by_row(width=("pooled_projection_dim", "in_text_dim2", "text_emb_dim")),
    "guidance": lambda draw: draw.numbers(2, 4) if draw.of("guidance_embeds") else None,
    "encoder_attention_mask": Draw.mask,
    "encoder_hidden_states_mask": Draw.mask,
    "img_ids": lambda draw: draw.ids(*draw.grid),
    "txt_ids": lambda draw: draw.ids(1, 1, draw.text) * 0,
    "position_ids": lambda draw: torch.cat([draw.ids(1, 1, draw.text) * 0, draw.ids(*draw.grid)]),
    "img_shapes": lambda draw: [[draw.grid]] * draw.rows,
    "num_frames": lambda draw: draw.grid[0],
    "height": lambda draw: draw.grid[1],
    "width": lambda draw: draw.grid[2],
    "image_rotary_emb": _rotary,
    "encoder_hidden_states_image": _image,
    "image_embeds": lambda draw: draw.by_row(draw.text, width=["image_embed_dim"]),
    "encoder_hidden_states_2": lambda draw: draw.by_row(draw.text, width=["text_embed_2_dim"]),
    "encoder_attention_mask_2": lambda draw: draw.mask() if draw.of("text_embed_2_dim") else None,
    "control_hidden_states": lambda draw: draw.normal(draw.rows, draw.of("vace_in_channels"), *draw.pixels),
    "original_size": lambda draw: draw.constant(6, 10),
    "target_size": lambda draw: draw.constant(6, 10),
    "crop_coords": lambda draw: draw.constant(6, 10),
    "added_cond_kwargs": lambda draw: {"resolution": draw.constant(6, 10), "aspect_ratio": draw.constant(6)},
    "prior_token_id": lambda draw: torch.arange(draw.tokens, device=draw.device).expand(draw.rows, -1) % 16,
    "prior_token_drop": lambda draw: torch.zeros(draw.rows, draw.tokens, dtype=torch.bool, device=draw.device),
    "audio_hidden_states": lambda draw: draw.by_row(2 * draw.text, width=("audio_in_channels", "in_audio_dim")),
    "audio_num_frames": lambda draw: 2 * draw.text,
    "audio_encoder_hidden_states": _text,
    "audio_encoder_attention_mask": Draw.mask,
    "sigma": lambda draw: draw.numbers(0.1, 0.9),
    "text_bth": _text,
    "text_lens": lambda draw: draw.mask().sum(1),
    "context_latents": lambda draw: draw.normal(
        draw.rows, 2 * draw.tokens, draw.of("in_channels") - draw.of(*_CHANNELS)
    ),
    "r_timestep": lambda draw: _by_frame(draw) / 2,
    "StableAudio3DiTModel.global_hidden_states": lambda draw: draw.by_row(width=["global_cond_dim"]),
    "StableAudioDiTModel.global_hidden_states": lambda draw: draw.by_row(1, width=["global_states_input_dim"]),
    "x": lambda draw: list(draw.normal(draw.rows, draw.of("in_channels"), 1, *draw.pixels[1:])),
    "t": lambda draw: draw.numbers(0.1, 0.9),
    "cap_feats": lambda draw: [draw.normal(draw.text - i, draw.of("cap_feat_dim")) for i in range(draw.rows)],
    "LatteTransformer3DModel.enable_temporal_attentions": lambda draw: True,
    "LatteTransformer3DModel.encoder_attention_mask": lambda draw: draw.mask().repeat_interleave(
        draw.of("video_length"), 0
    )[:, None],
    "CosmosTransformer3DModel.padding_mask": lambda draw: draw.normal(1, 1, *draw.grid[1:], trained=False) * 0,
    "CosmosTransformer3DModel.attention_mask": Draw.mask,
    "AceStepTransformer1DModel.timestep_r": lambda draw: draw.numbers(3, 700),
    "AceStepTransformer1DModel.hidden_states": lambda draw: draw.by_row(2 * draw.tokens, width=_CHANNELS),
    "AnyFlowTransformer3DModel.timestep": _by_frame,
}
"""A value by the name of an argument, after its class where others have the argument too; None: leave it out."""


def make_inputs(kind: type, draw: Draw) -> Inputs:
    """Return random inputs of a class of models, the same in each call.

    Raises:
        LongspanError: if an argument that the class needs has no rule.
    """
    parameters = dict(list(inspect.signature(kind.forward).parameters.items())[1:])  # type: ignore[attr-defined]
    rules = {name: RULES.get(f"{kind.__name__}.{name}") or RULES.get(name) for name in parameters}
    for name, parameter in parameters.items():
        if rules[name] is None and parameter.default is parameter.empty:
            raise LongspanError(f"no rule for its argument `{name}`")
    draw.generator.manual_seed(draw.generator.initial_seed())
    inputs = {name: rule(draw) for name, rule in rules.items() if rule is not None}
    return {name: value for name, value in inputs.items() if value is not None}


def failure(model: Any, inputs: Inputs) -> str:
    """Return why a model does not run on inputs; "" if it does."""
    try:
        with torch.no_grad():
            model(**inputs, return_dict=False)
    except Exception as error:  # of any kind
        return f"{type(error).__name__}: {str(error)[:150]}"
    return ""


def find_inputs(model: Any, draw: Draw) -> tuple[str, Inputs]:
    """Return the first layout of latents that a model runs on, and random inputs of this layout."""
    errors = []
    for layout in ("BNC", "BCHW", "BCFHW", "BFCHW", "BFHWC", "BCN"):
        inputs = make_inputs(type(model), replace(draw, layout=layout))
        if not (error := failure(model, inputs)):
            return layout, inputs
        errors.append(f"{layout}: {error}")
    raise ValueError("; ".join(errors))
