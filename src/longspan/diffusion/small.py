"""A small copy of a transformer of diffusers, from its config, and random inputs, from the signature of its forward.

`parallelize` compares the copy with itself over the ranks; `verify` and the tests use the inputs of any size.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
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
    "in_text_dim", "text_hidden_dim", "text_in_dim", "encoder_hidden_states_channels", "cond_token_dim",
    "cross_attention_input_dim", "cross_attention_dim", "condition_dim", "llm_features_dim", "dit_text_dim",
    "encoder_hidden_size", "hidden_size",
)  # fmt: skip
_CHANNELS = (
    "audio_acoustic_hidden_dim", "in_channels", "in_visual_dim", "in_dim", "io_channels", "latent_channel",
    "latent_dim",
)  # fmt: skip
_LARGEST = 20_000_000  # weights of a small copy


def first_of(config: Any, names: tuple[str, ...], default: Any = None) -> Any:
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
    streams = {name[: m.start()] for name in config if (m := re.search(rf"(?<=_)({_HEADS})$", name))}  # as "audio_"
    parts: dict[str, dict[str, Any]] = {}
    for name, value in config.items():
        prefix = next((s for s in streams if name.startswith(s)), "")
        parts.setdefault(prefix, {})[name[len(prefix) :]] = value
    small = {prefix + name: x for prefix, part in parts.items() for name, x in _shrunk(part, heads, layers).items()}
    return {name: small[name] for name in config} | _CONFIGS.get(kind, {})


def _shrunk(config: dict[str, Any], heads: int, layers: int) -> dict[str, Any]:
    old_heads = next((x for name, x in config.items() if re.fullmatch(_HEADS, name) and x), 1)
    old_width = first_of(config, _WIDTH) or old_heads * first_of(config, _HEAD_DIM, 1)
    axes = first_of(config, _AXES)
    head_dim = 16 if isinstance(axes, tuple | list) and len(axes) == 4 else 12  # even parts

    def size(name: str, value: int) -> int:
        if re.fullmatch(_HEADS, name):
            return heads
        if re.fullmatch(r"(num_key_value|num_kv|n_kv)(_attention)?_heads", name):
            return max(1, heads * value // int(old_heads))
        if name in _HEAD_DIM:
            return head_dim
        if value and value % max(int(old_width), 16) == 0:
            return value // int(old_width) * heads * head_dim
        if re.search(r"(layers|depth|blocks)$", name):
            return min(value, layers)
        if name in _TEXT or (name.endswith("_dim") and value > 256):
            return 16
        return value if value <= 256 else 24

    def entry(name: str, value: Any) -> Any:
        if name in _AXES and isinstance(value, tuple | list):
            return type(value)([head_dim // len(value)] * len(value))
        return size(name, value) if type(value) is int else value

    return {name: entry(name, value) for name, value in config.items()}


def small_copy(kind: Any, config: dict[str, Any], device: torch.device) -> Any:
    """Return a small model in fp32, the same on every rank. No weight is zero, as then gradients of others would be."""
    with torch.device("meta"):
        size = sum(p.numel() for p in kind(**config).parameters())
    if size > _LARGEST:
        raise LongspanError(f"its small copy would have {size:,} weights, as its config could not be shrunk")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(**config).float()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=0.1)
    return model.to(device)


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

    def normal(self, *shape: int, trained: bool = True) -> Tensor:
        x = torch.randn(*shape, generator=self.generator, dtype=self.dtype)
        return x.to(self.device).requires_grad_(trained)

    def of(self, *names: str, default: Any = None) -> Any:
        """Return the first of these entries that the config has."""
        return first_of(self.config, names, default)

    def by_row(self, *shape: int | str) -> Tensor | None:
        """Return `[rows, *shape]`; None if the config lacks an entry that `shape` names."""
        sizes = [self.of(n) if isinstance(n, str) else n for n in shape]
        return None if None in sizes else self.normal(self.rows, *sizes)

    def pixels(self, grid: tuple[int, int, int]) -> tuple[int, ...]:
        return tuple(n * p for n, p in zip(grid, patch_of(self.config), strict=True))

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


def latents(draw: Draw, layout: str) -> Tensor:
    """Return pixels or tokens in a layout: "BCFHW", "BFCHW", "BCHW" or "BNC"."""
    channels = draw.of(*_CHANNELS)
    if draw.of("visual_cond"):  # a condition and its mask
        channels = 2 * channels + 1
    n = math.prod(draw.grid if "F" in layout or layout == "BNC" else draw.grid[1:])
    frames, height, width = draw.pixels(draw.grid)
    frames = draw.of("video_length", default=frames)
    sizes = {"B": draw.rows, "C": channels, "N": n, "F": frames, "H": height, "W": width}
    return draw.normal(*(sizes[axis] for axis in layout))


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
    angles = draw.normal(math.prod(draw.grid), draw.of(*_HEAD_DIM), trained=False)
    return angles.cos(), angles.sin()


def _sound(draw: Draw) -> Tensor | None:
    """Return a sound that belongs to a video, with fewer tokens."""
    return draw.normal(draw.rows, 2 * draw.text, draw.of("audio_in_channels", "in_audio_dim"))


def _by_frame(draw: Draw) -> Tensor:
    return draw.numbers(3, 700)[:, None].expand(-1, draw.grid[0])


RULES: dict[str, Callable[[Draw], Any]] = {
    "encoder_hidden_states": _text,
    "timestep": lambda draw: draw.numbers(3, 700),
    "pooled_projections": lambda draw: draw.by_row(
        next((name for name in ("pooled_projection_dim", "in_text_dim2", "text_emb_dim") if draw.of(name)), "none")
    ),
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
    "image_embeds": lambda draw: draw.by_row(draw.text, "image_embed_dim"),
    "encoder_hidden_states_2": lambda draw: draw.by_row(draw.text, "text_embed_2_dim"),
    "encoder_attention_mask_2": lambda draw: draw.mask() if draw.of("text_embed_2_dim") else None,
    "control_hidden_states": lambda draw: draw.by_row("vace_in_channels", *draw.pixels(draw.grid)),
    "original_size": lambda draw: draw.constant(6, 10),
    "target_size": lambda draw: draw.constant(6, 10),
    "crop_coords": lambda draw: draw.constant(6, 10),
    "added_cond_kwargs": lambda draw: {"resolution": draw.constant(6, 10), "aspect_ratio": draw.constant(6)},
    "prior_token_id": lambda draw: torch.arange(math.prod(draw.grid), device=draw.device).expand(draw.rows, -1) % 16,
    "prior_token_drop": lambda draw: torch.zeros(draw.rows, math.prod(draw.grid), dtype=torch.bool, device=draw.device),
    "audio_hidden_states": _sound,
    "audio_num_frames": lambda draw: 2 * draw.text,
    "audio_encoder_hidden_states": _text,
    "audio_encoder_attention_mask": Draw.mask,
    "sigma": lambda draw: draw.numbers(0.1, 0.9),
    "text_bth": _text,
    "text_lens": lambda draw: draw.mask().sum(1),
    "context_latents": lambda draw: draw.normal(
        draw.rows, 2 * math.prod(draw.grid), draw.of("in_channels") - draw.of("audio_acoustic_hidden_dim")
    ),
    "r_timestep": lambda draw: _by_frame(draw) / 2,
    "global_hidden_states": lambda draw: (
        draw.by_row("global_cond_dim") if draw.of("global_cond_dim") else draw.by_row(1, "global_states_input_dim")
    ),
    "ofs": lambda draw: torch.full((1,), 2.0, device=draw.device) if draw.of("ofs_embed_dim") else None,
    "x": lambda draw: list(draw.normal(draw.rows, draw.of("in_channels"), 1, *draw.pixels((1, *draw.grid[1:]))[1:])),
    "t": lambda draw: draw.numbers(0.1, 0.9),
    "cap_feats": lambda draw: [draw.normal(draw.text - i, draw.of("cap_feat_dim")) for i in range(draw.rows)],
}
"""A value by the name of an argument; None: leave it out."""

OTHERS: dict[str, dict[str, Callable[[Draw], Any]]] = {
    "LatteTransformer3DModel": {
        "enable_temporal_attentions": lambda draw: True,
        "encoder_attention_mask": lambda draw: draw.mask().repeat_interleave(draw.of("video_length"), 0)[:, None],
    },
    "CosmosTransformer3DModel": {
        "padding_mask": lambda draw: torch.zeros(1, 1, *draw.grid[1:], dtype=draw.dtype, device=draw.device),
        "attention_mask": Draw.mask,
    },
    "AceStepTransformer1DModel": {
        "timestep_r": lambda draw: draw.numbers(3, 700),
        "hidden_states": lambda draw: draw.by_row(2 * math.prod(draw.grid), "audio_acoustic_hidden_dim"),
    },
    "AnyFlowTransformer3DModel": {"timestep": _by_frame},
}
"""What differs, by class and argument."""


def make_inputs(kind: type, draw: Draw, layout: str) -> Inputs:
    """Return random inputs of a class of models.

    Raises:
        LongspanError: if an argument that the class needs has no rule.
    """
    rules = {"hidden_states": lambda draw: latents(draw, layout)} | RULES | OTHERS.get(kind.__name__, {})
    parameters = list(inspect.signature(kind.forward).parameters.items())[1:]  # type: ignore[attr-defined]
    for name, parameter in parameters:
        if name not in rules and parameter.default is parameter.empty:
            raise LongspanError(f"no rule for its argument `{name}`")
    inputs = {name: rules[name](draw) for name, _ in parameters if name in rules}
    return {name: value for name, value in inputs.items() if value is not None}


LAYOUTS = ("BNC", "BCHW", "BCFHW", "BFCHW", "BFHWC", "BCN")


def find_layout(model: Any, make: Callable[[str], Inputs]) -> str:
    """Return the first layout of latents that a model runs on."""
    errors = []
    for layout in LAYOUTS:
        try:
            with torch.no_grad():
                model(**make(layout), return_dict=False)
            return layout
        except Exception as error:
            errors.append(f"{layout}: {type(error).__name__}: {str(error)[:150]}")
    raise ValueError("; ".join(errors))
