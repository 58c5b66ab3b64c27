"""Cache dtypes and their bytes, for the cache and the planner. Standard library only."""

from __future__ import annotations

from typing import Literal, get_args

CacheDtype = Literal["exact", "int8", "fp8"]

CACHE_DTYPES: tuple[CacheDtype, ...] = get_args(CacheDtype)
"""exact: as the model computes them. int8, fp8: one byte per element and an fp32 scale per head and token."""

CacheOffload = Literal["none", "host"]

OFFLOADS: tuple[CacheOffload, ...] = get_args(CacheOffload)
"""none: on the device. host: in host memory; a layer is copied to the device when it runs."""

SCALE_BYTES = 4


def holds_latent(latent: int, kv_heads: int, elements: int, shared: bool) -> bool:
    """Return whether a cache stores the latent vectors of a layer (MLA) instead of its keys and values.

    Args:
        latent: elements of a token's latent vector and rotary part; 0 for other attention.
        kv_heads: of the rank with most KV heads.
        elements: of a head's key and value together.
        shared: whether every rank may store the vectors, which belong to all heads.
    """
    return shared and 0 < latent < kv_heads * elements


def vector_bytes(code: str, elements: int, bytes_per_element: int) -> int:
    """Return the bytes of one key or value of one head.

    Args:
        code: of `CACHE_DTYPES`.
        elements: its head_dim.
        bytes_per_element: as the model computes it.
    """
    return elements * bytes_per_element if code == "exact" else elements + SCALE_BYTES
