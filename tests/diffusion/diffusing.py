"""Small models of diffusers with random weights, and their inputs."""

from __future__ import annotations

import contextlib
import copy
import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import longspan
from longspan.diffusion import small
from longspan.diffusion.check import run
from longspan.diffusion.small import Draw, Inputs

LATTE = {
    "num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 3, "out_channels": 6, "num_layers": 2,
    "cross_attention_dim": 32, "attention_bias": True, "sample_size": 8, "patch_size": 2,
    "activation_fn": "gelu-approximate", "num_embeds_ada_norm": 1000, "norm_type": "ada_norm_single",
    "norm_elementwise_affine": False, "caption_channels": 10,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "LatteTransformer3DModel": {**LATTE, "video_length": 5},
    "WanTransformer3DModel": {
        "patch_size": (1, 2, 2), "num_attention_heads": 4, "attention_head_dim": 12, "in_channels": 3,
        "out_channels": 3, "text_dim": 10, "freq_dim": 16, "ffn_dim": 24, "num_layers": 2, "rope_max_seq_len": 32,
        "cross_attn_norm": True,
    },
    "LTXVideoTransformer3DModel": {
        "in_channels": 6, "out_channels": 6, "num_attention_heads": 4, "attention_head_dim": 8,
        "cross_attention_dim": 32, "num_layers": 2, "caption_channels": 10,
    },
    "FluxTransformer2DModel": {
        "patch_size": 1, "in_channels": 6, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
        "num_attention_heads": 4, "joint_attention_dim": 10, "pooled_projection_dim": 9, "axes_dims_rope": (4, 4, 8),
        "guidance_embeds": True,
    },
    "CogVideoXTransformer3DModel": {
        "num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 3, "out_channels": 3, "time_embed_dim": 8,
        "text_embed_dim": 10, "num_layers": 2, "sample_width": 10, "sample_height": 6, "sample_frames": 9,
        "patch_size": 2, "temporal_compression_ratio": 4, "max_text_seq_length": 5,
        "use_rotary_positional_embeddings": True,
    },
    "HunyuanVideoTransformer3DModel": {
        "in_channels": 3, "out_channels": 3, "num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 1,
        "num_single_layers": 1, "num_refiner_layers": 1, "patch_size": 2, "patch_size_t": 1, "guidance_embeds": True,
        "text_embed_dim": 10, "pooled_projection_dim": 9, "rope_axes_dim": (2, 2, 4),
    },
    "QwenImageTransformer2DModel": {
        "patch_size": 1, "in_channels": 6, "out_channels": 6, "num_layers": 2, "attention_head_dim": 16,
        "num_attention_heads": 4, "joint_attention_dim": 10, "axes_dims_rope": (4, 4, 8),
    },
}  # fmt: skip


DEFAULTS: dict[str, dict[str, Any]] = {
    "CogVideoXTransformer3DModel": {"use_rotary_positional_embeddings": True},
    "ConsisIDTransformer3DModel": {"use_rotary_positional_embeddings": True},
    "CosmosTransformer3DModel": {"concat_padding_mask": False},  # torchvision resizes the mask
}
"""What a class lacks in the defaults of its config."""
CLASSES = (
    "AceStepTransformer1DModel", "AllegroTransformer3DModel", "AnyFlowTransformer3DModel",
    "AuraFlowTransformer2DModel", "BriaTransformer2DModel", "ChromaTransformer2DModel", "ChronoEditTransformer3DModel",
    "CogVideoXTransformer3DModel", "CogView3PlusTransformer2DModel", "CogView4Transformer2DModel",
    "ConsisIDTransformer3DModel", "CosmosTransformer3DModel", "ErnieImageTransformer2DModel", "Flux2Transformer2DModel",
    "Flux3Transformer2DModel", "FluxTransformer2DModel", "GlmImageTransformer2DModel", "HunyuanImageTransformer2DModel",
    "HunyuanVideo15Transformer3DModel", "HunyuanVideoTransformer3DModel", "JoyImageEditTransformer3DModel",
    "Kandinsky6Transformer3DModel", "Krea2Transformer2DModel",
    "LTX2VideoTransformer3DModel", "LTXVideoTransformer3DModel", "LongCatAudioDiTTransformer",
    "LongCatImageTransformer2DModel", "Lumina2Transformer2DModel", "MochiTransformer3DModel",
    "MotifVideoTransformer3DModel", "NucleusMoEImageTransformer2DModel", "OvisImageTransformer2DModel",
    "PRXTransformer2DModel", "PixArtTransformer2DModel", "QwenImageTransformer2DModel", "SD3Transformer2DModel",
    "SanaTransformer2DModel", "SkyReelsV2Transformer3DModel", "StableAudio3DiTModel", "StableAudioDiTModel",
    "WanTransformer3DModel", "WanVACETransformer3DModel", "ZImageTransformer2DModel",
)  # fmt: skip
"""The classes of diffusers that are accepted with their default config, by the rule."""


def small_case(name: str, grid: tuple[int, int, int] = (3, 5, 5), text: int = 7) -> tuple[nn.Module, Inputs]:
    """Return a small model of a class and inputs of so many tokens; in fp64 where the class can.

    By default the tokens do not divide by 2 or 4. An image has one frame.
    """
    kind = _kind(name)
    parameters = list(inspect.signature(kind.__init__).parameters.items())[1:]
    defaults = {key: p.default for key, p in parameters} | DEFAULTS.get(name, {})
    model: Any = small.small_copy(kind, small.small_config(name, defaults), CPU)
    frames = grid[0] if "3D" in name else 1
    for dtype in (torch.float64, torch.float32):
        draw = Draw(model.config, 2, (frames, *grid[1:]), text, seeded(), CPU, dtype)
        with contextlib.suppress(ValueError):
            return model.to(dtype), small.find_inputs(model, draw)[1]
    raise AssertionError(name)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def make_model(name: str, **config: Any) -> nn.Module:
    """Return a model in fp64, with the same random weights in every process. None of them is zero."""
    import diffusers

    torch.manual_seed(0)
    model: nn.Module = getattr(diffusers, name)(**{**CONFIGS[name], **config}).double()
    return small.without_zeros(model, 0.1)


GRIDS = {
    "LatteTransformer3DModel": (5, 4, 3),
    "LTXVideoTransformer3DModel": (1, 3, 5),
    "CogVideoXTransformer3DModel": (3, 3, 5),
}
"""Tokens of inputs: frames, height, width. Of other models 5 x 3 x 5, and 1 x 3 x 5 if they take tokens."""


LAYOUTS = {
    "CogVideoXTransformer3DModel": "BFCHW",
    "LTXVideoTransformer3DModel": "BNC",
    "FluxTransformer2DModel": "BNC",
    "QwenImageTransformer2DModel": "BNC",
}
"""Axes of the latents of models that do not take "BCFHW"."""
CPU = torch.device("cpu")


def make_inputs(name: str) -> Inputs:
    """Return inputs whose numbers of tokens do not divide by 2 or 4; tensors with gradients where possible."""
    with torch.device("meta"):
        config = _kind(name)(**CONFIGS[name]).config
    grid = GRIDS.get(name, (5, 3, 5) if "3D" in name else (1, 3, 5))
    layout = LAYOUTS.get(name, "BCFHW")
    return small.make_inputs(_kind(name), Draw(config, 2, grid, 5, seeded(), CPU, torch.float64, layout))


def _kind(name: str) -> Any:
    import diffusers

    return getattr(diffusers, name)


def sharding(**axes: int) -> longspan.SequenceSharding:
    mesh = longspan.init_mesh(**(axes or {"ulysses": dist.get_world_size()}), device_type="cpu")
    return longspan.SequenceSharding(mesh)


def compare(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        mine = actual[name]
        mine = mine.full_tensor() if isinstance(mine, DTensor) else mine
        # Models compute norms and rotations in fp32. A key's bias has gradient 0, up to rounding.
        torch.testing.assert_close(
            mine, x, rtol=2e-5, atol=1e-5 * float(x.abs().max()) + 1e-9, msg=lambda text, name=name: f"{name}: {text}"
        )


MESHES: dict[int, list[dict[str, int]]] = {
    2: [{"ulysses": 2}, {"ring": 2}],
    4: [{"ulysses": 4}, {"ring": 4}, {"ring": 2, "ulysses": 2}],
}


def small_on_meshes(name: str, meshes: list[dict[str, int]], *sizes: Any) -> None:
    """Compare a class with one process on meshes; `sizes` are those of `small_case`."""
    model, inputs = small_case(name, *sizes)
    expected = run(copy.deepcopy(model), inputs)
    exact = next(model.parameters()).dtype == torch.float64
    for i, axes in enumerate(meshes):
        sharded = longspan.parallelize(copy.deepcopy(model), sharding(**axes), fsdp=bool(i % 2))
        found = run(sharded, inputs)
        if exact:
            compare(found, expected)
            continue
        largest = max(float(x.abs().max()) for key, x in expected.items() if not key.startswith("output"))
        for key, x in expected.items():
            mine = found[key]
            mine = mine.full_tensor() if isinstance(mine, DTensor) else mine
            scale = max(float(x.abs().max()), 1e-2 * largest)
            torch.testing.assert_close(
                mine, x, rtol=1e-3, atol=1e-3 * scale, msg=lambda text, key=key: f"{key}: {text}"
            )
