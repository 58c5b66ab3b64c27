"""A small copy of a transformer of diffusers, from its config, and random inputs, from the signature of its forward.

`parallelize` compares the copy with itself over the ranks; `verify` and the tests use the inputs of any size.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Any]

_HEADS = ("num_attention_heads", "num_heads", "n_heads", "dit_heads", "num_cross_attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_key_value_attention_heads")
_HEAD_DIM = ("attention_head_dim", "head_dim", "linear_head_dim", "cross_attention_head_dim")
_WIDTH = ("hidden_size", "dim", "model_dim", "dit_dim", "embed_dim", "hidden_dim")
_AXES = ("axes_dims_rope", "rope_axes_dim", "axes_dims", "axes_dim_rope", "rope_dim_list", "axes_dim", "rope_dim")
_DEPTH = ("layers", "depth", "blocks")
_TEXT = (
    "joint_attention_dim", "text_dim", "text_embed_dim", "caption_channels", "context_in_dim", "cap_feat_dim",
    "in_text_dim", "text_hidden_dim", "text_in_dim", "encoder_hidden_states_channels", "cond_token_dim",
    "cross_attention_dim", "condition_dim", "llm_features_dim", "cross_attention_input_dim", "dit_text_dim",
    "encoder_hidden_size",
)  # fmt: skip
_NARROW = 16


def first_of(config: Any, names: tuple[str, ...], default: Any = None) -> Any:
    """Return the first of these entries that a config has."""
    return next((config[name] for name in names if config.get(name) is not None), default)


def patch_of(config: Any) -> tuple[int, int, int]:
    """Return the patch size along frames, height and width."""
    p = first_of(config, ("patch_size", "all_patch_size", "latent_patch_size"), 1)
    p = tuple(p) if isinstance(p, tuple | list) else (p,)
    return (p[0], p[1], p[2]) if len(p) == 3 else (first_of(config, ("patch_size_t",), 1), p[0], p[-1])


CONFIGS: dict[str, dict[str, Any]] = {
    "WanVACETransformer3DModel": {"vace_layers": [0]},
    "PRXTransformer2DModel": {"axes_dim": (6, 6)},
}
"""What differs in a small copy, by class."""


def shrink(config: dict[str, Any], heads: int = 4, layers: int = 2) -> dict[str, Any]:
    """Return a config of the same structure with few heads and layers, and narrow."""
    small: dict[str, Any] = {}
    streams = sorted({name[: -len(key)] for key in _HEADS for name in config if name.endswith("_" + key)} | {""})
    for prefix in streams:  # such as "audio_"
        own = {
            name[len(prefix) :]: x
            for name, x in config.items()
            if name.startswith(prefix) and (prefix or not any(s and name.startswith(s) for s in streams))
        }
        small |= {prefix + name: x for name, x in _shrink(own, heads, layers).items()}
    return {name: small[name] for name in config}


def _shrink(config: dict[str, Any], heads: int, layers: int) -> dict[str, Any]:
    old_heads, axes = first_of(config, _HEADS, 1), first_of(config, _AXES)
    old_width = first_of(config, _WIDTH) or old_heads * first_of(config, _HEAD_DIM, 1)
    head_dim = 16 if isinstance(axes, tuple | list) and len(axes) == 4 else 12  # even parts
    small: dict[str, Any] = {}
    for name, value in config.items():
        if name in _AXES and isinstance(value, tuple | list):
            small[name] = type(value)([head_dim // len(value)] * len(value))
        elif isinstance(value, bool) or not isinstance(value, int):
            small[name] = value
        elif name in _HEADS:
            small[name] = heads
        elif name in _KV_HEADS:
            small[name] = max(1, heads * value // old_heads)
        elif name in _HEAD_DIM:
            small[name] = head_dim
        elif value and value % max(old_width, 16) == 0:
            small[name] = value // old_width * heads * head_dim
        elif name.rpartition("_")[2] in _DEPTH:
            small[name] = min(value, layers)
        elif name in _TEXT or (name.endswith("_dim") and value > 256):
            small[name] = _NARROW
        else:
            small[name] = value if value <= 256 else 24
    return small


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

    @property
    def tokens(self) -> int:
        return math.prod(self.grid)

    @property
    def patch(self) -> tuple[int, int, int]:
        return patch_of(self.config)

    def text_mask(self) -> Tensor:
        """The first row has two tokens of padding."""
        mask = torch.ones(self.rows, self.text, dtype=torch.bool, device=self.device)
        mask[0, self.text - 2 :] = False
        return mask

    def ids(self, *grid: int) -> Tensor:
        axes = self.of(*_AXES, default=(1, 1, 1))
        width = len(axes) if isinstance(axes, tuple | list) else 3
        ids = torch.stack(torch.meshgrid(*map(torch.arange, grid), indexing="ij"), -1).flatten(0, -2)
        return torch.nn.functional.pad(ids, (0, width - 3)).to(self.device, torch.float32)

    def time(self, low: float = 3, high: float = 700) -> Tensor:
        return torch.linspace(low, high, self.rows, device=self.device, dtype=self.dtype)


def latents(draw: Draw, layout: str) -> Tensor:
    """Return pixels or tokens in a layout: "BCFHW", "BFCHW", "BCHW" or "BNC"."""
    sizes = dict(zip("FHW", (n * p for n, p in zip(draw.grid, draw.patch, strict=True)), strict=True))
    channels = draw.of("in_channels", "in_visual_dim", "in_dim", "io_channels", "latent_channel", "latent_dim")
    if draw.of("visual_cond"):  # a condition and its mask
        channels = 2 * channels + 1
    n = math.prod(draw.grid if "F" in layout or layout == "BNC" else draw.grid[1:])
    sizes |= {"B": draw.rows, "C": channels, "N": n}
    return draw.normal(*(sizes[axis] for axis in layout))


def _text(draw: Draw, *names: str) -> Tensor:
    return draw.normal(draw.rows, draw.text, draw.of(*names, *_TEXT))


def _guidance(draw: Draw) -> Tensor | None:
    return torch.linspace(2, 4, draw.rows, dtype=draw.dtype) if draw.of("guidance_embeds") else None


def _rotary(draw: Draw) -> Any:
    if not draw.of("use_rotary_positional_embeddings"):
        return None
    angles = draw.normal(math.prod(draw.grid), draw.of(*_HEAD_DIM), trained=False)
    return angles.cos(), angles.sin()


def _pooled(draw: Draw) -> Tensor | None:
    width = draw.of("pooled_projection_dim", "in_text_dim2", "text_emb_dim")
    return None if width is None else draw.normal(draw.rows, width)


RULES: dict[str, Callable[[Draw], Any]] = {
    "encoder_hidden_states": _text,
    "timestep": lambda draw: draw.time(),
    "pooled_projections": _pooled,
    "guidance": _guidance,
    "encoder_attention_mask": lambda draw: draw.text_mask(),
    "encoder_hidden_states_mask": lambda draw: draw.text_mask(),
    "img_ids": lambda draw: draw.ids(*draw.grid),
    "txt_ids": lambda draw: draw.ids(1, 1, draw.text) * 0,
    "img_shapes": lambda draw: [[draw.grid]] * draw.rows,
    "num_frames": lambda draw: draw.grid[0],
    "height": lambda draw: draw.grid[1],
    "width": lambda draw: draw.grid[2],
    "image_rotary_emb": _rotary,
}
"""A value by the name of an argument; None: leave it out."""


def _image(draw: Draw) -> Tensor | None:
    """Return the tokens of an image, of two images where the model embeds their positions."""
    width, places = draw.of("image_dim"), draw.of("pos_embed_seq_len")
    if width is None:
        return None
    return draw.normal(2 * draw.rows, places // 2, width) if places else draw.normal(draw.rows, 3, width)


def _size(draw: Draw) -> Tensor:
    return torch.tensor([[6.0, 10.0]], device=draw.device, dtype=draw.dtype).expand(draw.rows, -1)


def _arange(draw: Draw, n: int) -> Tensor:
    return torch.arange(n, device=draw.device)


def _grids(draw: Draw) -> tuple[Tensor, ...]:
    return tuple(_arange(draw, n) for n in draw.grid)


def _audio(draw: Draw) -> Tensor:
    """Return the tokens of a sound that belongs to a video, fewer than those of the video."""
    width = draw.of("audio_in_channels", "in_audio_dim", "audio_acoustic_hidden_dim")
    return draw.normal(draw.rows, draw.text * 2, width)


_SIZES: dict[str, Callable[[Draw], Any]] = {"original_size": _size, "target_size": _size, "crop_coords": _size}
_WAN: dict[str, Callable[[Draw], Any]] = {
    "encoder_hidden_states_image": _image,
    "encoder_hidden_states": lambda draw: (
        _text(draw) if draw.of("image_dim") is None else draw.normal(draw.rows, 512, draw.of("text_dim"))
    ),
}
OTHERS: dict[str, dict[str, Callable[[Draw], Any]]] = {
    "LatteTransformer3DModel": {
        "hidden_states": lambda draw: draw.normal(
            draw.rows, draw.of("in_channels"), draw.of("video_length"), *(n * draw.patch[1] for n in draw.grid[1:])
        ),
        "encoder_attention_mask": lambda draw: draw.text_mask().repeat_interleave(draw.of("video_length"), 0)[:, None],
    },
    "WanTransformer3DModel": _WAN,
    "ChronoEditTransformer3DModel": _WAN,
    "WanVACETransformer3DModel": {
        "control_hidden_states": lambda draw: draw.normal(
            draw.rows,
            draw.of("vace_in_channels"),
            *(n * p for n, p in zip(draw.grid, draw.patch, strict=True)),
        ),
    },
    "CosmosTransformer3DModel": {
        "padding_mask": lambda draw: torch.zeros(
            1, 1, draw.grid[1], draw.grid[2], dtype=draw.dtype, device=draw.device
        ),
        "attention_mask": lambda draw: draw.text_mask(),
    },
    "CogView3PlusTransformer2DModel": _SIZES,
    "CogView4Transformer2DModel": _SIZES,
    "GlmImageTransformer2DModel": {
        **_SIZES,
        "prior_token_id": lambda draw: _arange(draw, draw.rows * draw.tokens).view(draw.rows, -1) % 16,
        "prior_token_drop": lambda draw: torch.zeros(draw.rows, draw.tokens, dtype=torch.bool, device=draw.device),
    },
    "LTX2VideoTransformer3DModel": {
        "audio_hidden_states": _audio,
        "audio_num_frames": lambda draw: draw.text * 2,
        "audio_encoder_hidden_states": _text,
        "audio_encoder_attention_mask": lambda draw: draw.text_mask(),
        "sigma": lambda draw: draw.time(0.1, 0.9),
    },
    "Kandinsky5Transformer3DModel": {
        "visual_rope_pos": _grids,
        "text_rope_pos": lambda draw: _arange(draw, draw.text),
    },
    "Kandinsky6Transformer3DModel": {"audio_hidden_states": _audio},
    "Krea2Transformer2DModel": {
        "encoder_hidden_states": lambda draw: draw.normal(
            draw.rows, draw.text, draw.of("num_text_layers"), draw.of("text_hidden_dim")
        ),
        "position_ids": lambda draw: torch.cat([draw.ids(1, 1, draw.text) * 0, draw.ids(*draw.grid)]),
    },
    "ErnieImageTransformer2DModel": {
        "text_bth": _text,
        "text_lens": lambda draw: draw.text_mask().sum(1),
    },
    "AceStepTransformer1DModel": {
        "hidden_states": lambda draw: draw.normal(draw.rows, 2 * draw.tokens, draw.of("audio_acoustic_hidden_dim")),
        "context_latents": lambda draw: draw.normal(
            draw.rows, 2 * draw.tokens, draw.of("in_channels") - draw.of("audio_acoustic_hidden_dim")
        ),
        "encoder_hidden_states": lambda draw: _text(draw, "encoder_hidden_size", "hidden_size"),
        "timestep_r": lambda draw: draw.time(),
    },
    "PixArtTransformer2DModel": {
        "added_cond_kwargs": lambda draw: {"resolution": _size(draw), "aspect_ratio": _size(draw)[:, :1]},
    },
    "StableAudioDiTModel": {
        "encoder_hidden_states": lambda draw: _text(draw, "cross_attention_input_dim"),
        "global_hidden_states": lambda draw: draw.normal(draw.rows, 1, draw.of("global_states_input_dim")),
    },
    "StableAudio3DiTModel": {
        "encoder_hidden_states": lambda draw: _text(draw, "cond_token_dim"),
        "global_hidden_states": lambda draw: draw.normal(draw.rows, draw.of("global_cond_dim")),
    },
    "HunyuanVideo15Transformer3DModel": {
        "encoder_hidden_states_2": lambda draw: draw.normal(draw.rows, draw.text, draw.of("text_embed_2_dim")),
        "encoder_attention_mask_2": lambda draw: draw.text_mask(),
        "image_embeds": lambda draw: draw.normal(draw.rows, draw.text, draw.of("image_embed_dim")),
    },
    "DiTTransformer2DModel": {"class_labels": lambda draw: _arange(draw, draw.rows)},
    "HunyuanDiT2DModel": {
        "text_embedding_mask": lambda draw: draw.text_mask(),
        "encoder_hidden_states": lambda draw: draw.normal(
            draw.rows, draw.of("text_len"), draw.of("cross_attention_dim")
        ),
    },
    "ZImageTransformer2DModel": {
        "x": lambda draw: [
            draw.normal(draw.of("in_channels"), 1, 2 * draw.grid[1], 2 * draw.grid[2]) for _ in range(draw.rows)
        ],
        "t": lambda draw: draw.time(0.1, 0.9),
        "cap_feats": lambda draw: [draw.normal(draw.text - i, draw.of("cap_feat_dim")) for i in range(draw.rows)],
    },
    "AnyFlowTransformer3DModel": {
        "timestep": lambda draw: draw.time()[:, None].expand(-1, draw.grid[0]),
        "r_timestep": lambda draw: draw.time()[:, None].expand(-1, draw.grid[0]) / 2,
    },
    "SkyReelsV2Transformer3DModel": _WAN,
    "CogVideoXTransformer3DModel": {
        "ofs": lambda draw: torch.full((1,), 2.0, device=draw.device) if draw.of("ofs_embed_dim") else None,
    },
}
"""What differs, by class and argument."""


def make_inputs(kind: type, draw: Draw, layout: str) -> Inputs:
    """Return random inputs of a class of models."""
    rules = RULES | OTHERS.get(kind.__name__, {})
    inputs: Inputs = {}
    parameters = inspect.signature(kind.forward).parameters  # type: ignore[attr-defined]
    for name, parameter in list(parameters.items())[1:]:
        if parameter.default is parameter.empty and name not in (*rules, "hidden_states"):
            raise ValueError(f"no rule for its argument `{name}`")
    for name in list(parameters)[1:]:
        if name in rules:
            value = rules[name](draw)
        elif name == "hidden_states":
            value = latents(draw, layout)
        else:
            continue
        if value is not None:
            inputs[name] = value
    return inputs


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
