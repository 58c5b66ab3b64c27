"""Latent attention (DeepSeek's MLA) over a cache of latent vectors, without expanding them to keys and values.

A layer computes keys and values of all heads from one vector c per token, k_h = [W_k,h c, r] and v_h = W_v,h c, with a
rotary part r that all heads share. So q_h . k_h = (W_k,h^T q_h) . c + q_r . r, and an output is W_v,h times the
weighted sum of the c. This is attention of H query heads of R + rope elements over one KV head, whose values are the
first R elements of its keys (DeepSeek-AI 2024, "DeepSeek-V2", arXiv:2405.04434, section 2.1.2 and appendix C). A cache
stores R + rope elements per token, 576 in DeepSeek-V3, instead of 128 x (192 + 128).

Sums run in another order than in a model that expands its keys. Attention takes (2 R + rope) / (D + V) times as many
multiplications, 3.4 in DeepSeek-V3.

Shape suffixes: B batch, L new tokens, H query heads, N elements of a head's key without position, D its whole key, V
its value, R the latent vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longspan.compat.reading import is_indexed
from longspan.core.errors import LongspanError

if TYPE_CHECKING:
    from collections.abc import Mapping

MODELS = frozenset({"deepseek_v2", "deepseek_v3", "kimi_linear"})
"""Families (`model_type`) whose attention expands latent vectors as described above."""

_SIZES = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
# Largest relative difference of keys computed in two ways; GPUs may multiply fp32 as TF32.
_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-2}


@dataclass(eq=False)
class LatentLayer:
    """An attention layer that computes its keys and values from latent vectors; captures the vectors of a forward."""

    layer: nn.Module  # the attention module
    nope: int  # elements of a key without position
    rope: int  # elements of a key with position
    value: int  # elements of a value
    rank: int  # elements of the latent vector
    _captured: Tensor | None = None

    @property
    def width(self) -> int:
        """Elements that a cache stores per token."""
        return self.rank + self.rope

    def take(self) -> Tensor | None:
        """Return the latent vectors of the current forward, `[B, L, R]`, and keep no reference to them."""
        captured, self._captured = self._captured, None
        return None if captured is None else captured.reshape(captured.shape[0], -1, self.rank)

    def capture(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Capture the input of the projection that expands latent vectors; a forward pre-hook."""
        if not torch.is_grad_enabled():  # a forward with a cache has no gradients
            self._captured = args[0]

    def weights(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights that expand a latent vector to keys, `[H, N, R]`, and to values, `[H, V, R]`, in the
        dtype of `like`.
        """
        projection: Any = self.layer.kv_b_proj
        if type(projection) is nn.Linear:
            matrix = projection.weight.to(like.dtype)
        else:  # an adapter, or quantized
            matrix = projection(torch.eye(self.rank, device=like.device, dtype=like.dtype)).T
            self._captured = None
        of_heads = matrix.unflatten(0, (-1, self.nope + self.value))
        return of_heads[:, : self.nope], of_heads[:, self.nope :]

    def absorb(self, c: Tensor, q: Tensor, k: Tensor, v: Tensor, first: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys and values for attention over latent vectors.

        Args:
            c: latent vectors of the new tokens, `[B, L, R]`.
            q: queries `[B, L, H, D]`.
            k: keys that the layer expanded, `[B, L, H, D]`.
            v: values, `[B, L, H, V]`.
            first: whether the cache is empty; then check the layer's expansion.

        Returns:
            Queries `[B, L, H, R + rope]`, keys `[B, L, 1, R + rope]`, values `[B, L, 1, R]`, and the weights that
            expand weighted sums to outputs, `[H, V, R]`.

        Raises:
            LongspanError: the layer does not compute its keys and values from these vectors.
        """
        c = c.to(q.dtype)
        for_keys, for_values = self.weights(q)
        if first:
            self._check(c[:, :1], k[:, :1], v[:, :1], for_keys, for_values)
        q = self._absorbed(q, for_keys)
        k = torch.cat([c, k[:, :, 0, self.nope :]], 2)[:, :, None]
        return q, k, k[..., : self.rank], for_values

    def absorb_queries(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries for attention over latent vectors, and the weights that expand its output, as `absorb`."""
        for_keys, for_values = self.weights(q)
        return self._absorbed(q, for_keys), for_values

    def _absorbed(self, q: Tensor, for_keys: Tensor) -> Tensor:
        q_latent = torch.einsum("blhn,hnr->blhr", q[..., : self.nope], for_keys)
        return torch.cat([q_latent, q[..., self.nope :]], 3)

    @staticmethod
    def join(c_B1LR: Tensor, rotary_B1LD: Tensor) -> tuple[Tensor, Tensor]:
        """Return latent vectors as keys and as values of one head, in place of a layer's `expand_kv`."""
        return torch.cat([c_B1LR, rotary_B1LD], 3), c_B1LR

    def _check(self, c: Tensor, k: Tensor, v: Tensor, for_keys: Tensor, for_values: Tensor) -> None:
        nope = torch.einsum("blr,hnr->blhn", c, for_keys)
        rotary = k[:, :, :1, self.nope :].expand(-1, -1, k.shape[2], -1)
        pairs = (torch.cat([nope, rotary], 3), k), (torch.einsum("blr,hdr->blhd", c, for_values), v)
        limit = _CLOSE.get(c.dtype, 0.05)
        for expanded, given in pairs:
            if bool((expanded - given).abs().max() > limit * given.abs().max().clamp(min=1e-6)):
                raise LongspanError(
                    f"{type(self.layer).__name__} does not compute its keys and values from the input of kv_b_proj as "
                    f"DeepSeek's attention does; use longspan.ShardedCache(model, latent=False)"
                )


def expand(out_BLHR: Tensor, for_values_HDR: Tensor) -> Tensor:
    """Return outputs `[B, L, H, V]` from weighted sums of latent vectors."""
    return torch.einsum("blhr,hdr->blhd", out_BLHR, for_values_HDR)


def latent_layer_of(layer: nn.Module, config: Any) -> LatentLayer | None:
    """Start to capture an attention layer's latent vectors; None if it has none."""
    sizes: Mapping[str, Any] = {name: getattr(layer, name, None) for name in _SIZES}
    projection, captures = getattr(layer, "kv_b_proj", None), getattr(config, "model_type", None) in MODELS
    if not (captures or is_indexed(layer)) or not isinstance(projection, nn.Module):
        return None
    if not all(isinstance(size, int) for size in sizes.values()):
        return None
    nope, rope, value, rank = (int(sizes[name]) for name in _SIZES)
    latents = LatentLayer(layer, nope, rope, value, rank)
    if captures:
        projection.register_forward_pre_hook(latents.capture)
    return latents
