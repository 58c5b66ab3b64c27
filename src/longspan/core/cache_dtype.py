"""How a KV cache may be written: what the code that does it and the planner both count with."""

from __future__ import annotations

from typing import Literal, get_args

CacheDtype = Literal["exact", "int8", "fp8"]

CACHE_DTYPES: tuple[CacheDtype, ...] = get_args(CacheDtype)
"""As they are, or a byte per element and an fp32 scale per head and token."""

CacheOffload = Literal["none", "host"]

OFFLOADS: tuple[CacheOffload, ...] = get_args(CacheOffload)
"""Where they lie: with what computes, or in the host's memory, from which each layer's come when it runs."""

SCALE_BYTES = 4


def holds_latent(latent: int, kv_heads: int, elements: int, shared: bool) -> bool:
    """Whether a cache holds the latent vectors of a layer (MLA) rather than the keys and values that are made of them.

    Args:
        latent: elements of a token's vector with its rotary part; 0 for other attention.
        kv_heads: of the rank that holds most.
        elements: of a head's key and value together.
        shared: whether every rank may hold them: they are of all heads.
    """
    return shared and 0 < latent < kv_heads * elements


def vector_bytes(code: str, elements: int, bytes_per_element: int) -> int:
    """Bytes of one key or value of one head.

    Args:
        code: of `CACHE_DTYPES`.
        elements: its head_dim.
        bytes_per_element: as the model computes it.
    """
    return elements * bytes_per_element if code == "exact" else elements + SCALE_BYTES
