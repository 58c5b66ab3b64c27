"""Small models of diffusers with random weights, and their inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Any]

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


def make_model(name: str, **config: Any) -> nn.Module:
    """Return a model in fp64, with the same random weights in every process. None of them is zero."""
    import diffusers

    torch.manual_seed(0)
    model: nn.Module = getattr(diffusers, name)(**{**CONFIGS[name], **config}).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return model


def make_inputs(name: str) -> Inputs:
    """Return inputs whose numbers of tokens do not divide by 2 or 4; tensors with gradients where possible."""
    torch.manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    video, text, mask = randn(2, 3, 5, 6, 10), randn(2, 5, 10), torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]])
    time = torch.tensor([3, 700])
    guidance, pooled = torch.tensor([2.0, 4.0], dtype=torch.float64), randn(2, 9)
    if name == "LatteTransformer3DModel":
        per_frame = mask.bool().repeat_interleave(5, 0).unsqueeze(1)
        return {
            "hidden_states": randn(2, 3, 5, 8, 6), "timestep": time, "encoder_hidden_states": text,
            "encoder_attention_mask": per_frame,
        }  # fmt: skip
    if name == "WanTransformer3DModel":
        return {"hidden_states": video, "timestep": time, "encoder_hidden_states": text}
    if name == "LTXVideoTransformer3DModel":
        return {
            "hidden_states": randn(2, 15, 6), "timestep": time, "encoder_hidden_states": text,
            "encoder_attention_mask": mask, "num_frames": 1, "height": 3, "width": 5,
        }  # fmt: skip
    if name == "FluxTransformer2DModel":
        grid = torch.stack(torch.meshgrid(torch.arange(1.0), torch.arange(3.0), torch.arange(5.0), indexing="ij"), -1)
        return {
            "hidden_states": randn(2, 15, 6), "timestep": time / 1000, "encoder_hidden_states": text,
            "pooled_projections": pooled, "guidance": guidance, "img_ids": grid.view(15, 3),
            "txt_ids": torch.zeros(5, 3),
        }  # fmt: skip
    if name == "CogVideoXTransformer3DModel":
        angles = torch.randn(3 * 15, 8)
        return {
            "hidden_states": randn(2, 3, 3, 6, 10), "timestep": time, "encoder_hidden_states": text,
            "image_rotary_emb": (angles.cos(), angles.sin()),
        }  # fmt: skip
    if name == "HunyuanVideoTransformer3DModel":
        return {
            "hidden_states": video, "timestep": time, "encoder_hidden_states": text, "encoder_attention_mask": mask,
            "pooled_projections": pooled, "guidance": guidance,
        }  # fmt: skip
    return {
        "hidden_states": randn(2, 15, 6), "timestep": time / 1000, "encoder_hidden_states": text,
        "encoder_hidden_states_mask": mask, "img_shapes": [[(1, 3, 5)]] * 2,
    }  # fmt: skip


def run(model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """Return the output of a loss, and the gradients of all weights and inputs."""
    tensors = {key: x for key, x in inputs.items() if isinstance(x, Tensor) and x.requires_grad}
    out: Tensor = model(**inputs, return_dict=False)[0]
    loss = (out * torch.sin(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape)).sum()
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()} | {key: x.grad for key, x in tensors.items()}
    return {"output": out.detach(), **{name: grad for name, grad in grads.items() if grad is not None}}
