"""Random inputs of the diffusers models that can be sharded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Draw:
    """Sizes and generator of random inputs."""

    config: Any  # the model's
    rows: int  # videos or images
    grid: tuple[int, int, int]  # frames, height and width in tokens; a model with a fixed grid ignores it
    generator: torch.Generator  # on the CPU, so that all devices have the same inputs
    device: torch.device
    dtype: torch.dtype = torch.float32  # of differentiable inputs, and of the guidance

    def normal(self, *shape: int, trained: bool = True) -> Tensor:
        x = torch.randn(*shape, generator=self.generator, dtype=self.dtype)
        return x.to(self.device).requires_grad_(trained)

    def common(self, video: tuple[int, ...], text_width: int, text_tokens: int = 5) -> Inputs:
        """Return the inputs that every family takes; `video` is the shape of one row."""
        return {
            "hidden_states": self.normal(self.rows, *video),
            "timestep": torch.linspace(3, 700, self.rows, device=self.device).long(),
            "encoder_hidden_states": self.normal(self.rows, text_tokens, text_width),
        }

    @property
    def text_mask(self) -> Tensor:
        """The first row has two tokens of padding."""
        mask = torch.ones(self.rows, 5, dtype=torch.long, device=self.device)
        mask[0, 3:] = 0
        return mask

    def guidance(self) -> Inputs:
        if not self.config.get("guidance_embeds"):
            return {}
        return {"guidance": torch.linspace(2, 4, self.rows, dtype=self.dtype, device=self.device)}


def _latte(draw: Draw) -> Inputs:
    """Return pixels, and a mask of the text for each frame."""
    of, (_, height, width) = draw.config, draw.grid
    frames, p = of.video_length, of.patch_size
    return {
        **draw.common((of.in_channels, frames, p * height, p * width), of.caption_channels),
        "encoder_attention_mask": draw.text_mask.bool().repeat_interleave(frames, 0).unsqueeze(1),
    }


def _wan(draw: Draw) -> Inputs:
    """Return pixels; if the model also reads an image, its tokens and 512 tokens of text."""
    of = draw.config
    video = (of.in_channels, *(n * p for n, p in zip(draw.grid, of.patch_size, strict=True)))
    if of.image_dim is None:
        return draw.common(video, of.text_dim)
    if of.pos_embed_seq_len:  # of the first frame and the last
        image = draw.normal(2 * draw.rows, of.pos_embed_seq_len // 2, of.image_dim)
    else:
        image = draw.normal(draw.rows, 3, of.image_dim)
    return {**draw.common(video, of.text_dim, 512), "encoder_hidden_states_image": image}


def _ltx(draw: Draw) -> Inputs:
    """Return tokens and their grid."""
    of, (frames, height, width) = draw.config, draw.grid
    return {
        **draw.common((frames * height * width, of.in_channels), of.caption_channels),
        "encoder_attention_mask": draw.text_mask,
        **{"num_frames": frames, "height": height, "width": width},
    }


def _flux(draw: Draw) -> Inputs:
    """Return tokens of one frame, time steps up to 1, and positions."""
    of, (_, height, width) = draw.config, draw.grid
    inputs = draw.common((height * width, of.in_channels), of.joint_attention_dim)
    axes = (torch.arange(n, device=draw.device, dtype=torch.float32) for n in (1, height, width))
    return {
        **inputs,
        "timestep": inputs["timestep"] / 1000,
        "pooled_projections": draw.normal(draw.rows, of.pooled_projection_dim),
        **draw.guidance(),
        "img_ids": torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).view(-1, 3),
        "txt_ids": torch.zeros(5, 3, device=draw.device),
    }


def _cogvideox(draw: Draw) -> Inputs:
    """Return pixels of three frames and rotary angles, or the model's own grid if it learns positions."""
    of, (_, height, width) = draw.config, draw.grid
    t, p, frames = of.patch_size_t or 1, of.patch_size, 3
    if of.use_learned_positional_embeddings:  # it has one embedding for each place
        height, width = of.sample_height // p, of.sample_width // p
        frames = (of.sample_frames - 1) // of.temporal_compression_ratio + 1
    inputs = draw.common((t * frames, of.in_channels, p * height, p * width), of.text_embed_dim)
    if of.ofs_embed_dim:
        inputs["ofs"] = torch.full((1,), 2.0, device=draw.device)
    if of.use_rotary_positional_embeddings:
        angles = draw.normal(frames * height * width, of.attention_head_dim, trained=False)
        inputs["image_rotary_emb"] = (angles.cos(), angles.sin())
    return inputs


def _hunyuan_video(draw: Draw) -> Inputs:
    """Return pixels, a mask of the text and its pooled embedding."""
    of, (frames, height, width) = draw.config, draw.grid
    t, p = of.patch_size_t, of.patch_size
    return {
        **draw.common((of.in_channels, t * frames, p * height, p * width), of.text_embed_dim),
        "encoder_attention_mask": draw.text_mask,
        "pooled_projections": draw.normal(draw.rows, of.pooled_projection_dim),
        **draw.guidance(),
    }


def _qwen_image(draw: Draw) -> Inputs:
    """Return tokens of one frame, time steps up to 1, and a mask of the text."""
    of, (_, height, width) = draw.config, draw.grid
    inputs = draw.common((height * width, of.in_channels), of.joint_attention_dim)
    if of.use_additional_t_cond:
        inputs["additional_t_cond"] = torch.zeros(draw.rows, dtype=torch.long, device=draw.device)
    return {
        **inputs,
        "timestep": inputs["timestep"] / 1000,
        **draw.guidance(),
        "encoder_hidden_states_mask": draw.text_mask,
        "img_shapes": [[(1, height, width)]] * draw.rows,
    }


INPUTS: dict[str, Callable[[Draw], Inputs]] = {
    "LatteTransformer3DModel": _latte,
    "WanTransformer3DModel": _wan,
    "LTXVideoTransformer3DModel": _ltx,
    "FluxTransformer2DModel": _flux,
    "CogVideoXTransformer3DModel": _cogvideox,
    "HunyuanVideoTransformer3DModel": _hunyuan_video,
    "QwenImageTransformer2DModel": _qwen_image,
}
"""Random inputs of a model, by the name of its class."""
