"""Building blocks of families: mixers and MLPs from a config, and which layer has which."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from longspan.core.errors import LongspanError
from longspan.plan.layers import Chunk, Dense, Experts, Reach, Softmax, Window
from longspan.plan.models.config import Config
from longspan.plan.models.family import MixerOf, MlpOf
from longspan.plan.models.shape import Parameter

Weights = Callable[[Config, Any], Iterator[Parameter]]


# Mixers.


def grouped(c: Config) -> Softmax:
    """Query heads in groups over the key and value heads."""
    q = c.count("num_attention_heads")
    kv = c.optional("num_key_value_heads") or q
    c.divides("num_attention_heads", "num_key_value_heads", q, kv)
    dim = c.optional("head_dim")
    if dim is None:
        c.divides("hidden_size", "num_attention_heads", c.d, q)
        dim = c.d // q
    return Softmax(q, kv, dim, dim)


def all_of_hidden(c: Config) -> Softmax:
    """Heads that share out the hidden size, with keys and values of their own."""
    q = c.count("num_attention_heads")
    c.divides("hidden_size", "num_attention_heads", c.d, q)
    return Softmax(q, q, c.d // q, c.d // q)


def softmax(
    weights: Weights, heads: Callable[[Config], Softmax] = grouped, *, window: bool = True, chunk: bool = False
) -> dict[str, MixerOf]:
    """Softmax attention by layer type: in full, with a window, in chunks."""
    full = MixerOf(heads, weights)
    found = {"full_attention": full, "attention": full}
    if window:
        found["sliding_attention"] = MixerOf(lambda c: replace(heads(c), reach=_window(c)), weights)
    if chunk:
        found["chunked_attention"] = MixerOf(lambda c: replace(heads(c), reach=_chunk(c)), weights)
    return found


def _window(c: Config) -> Reach:
    tokens = sliding_window(c)
    if tokens is None:
        raise _not_in_use(c, "sliding_attention", "sliding_window")
    return Window(tokens)


def _chunk(c: Config) -> Reach:
    tokens = c.optional("attention_chunk_size")
    if tokens is None:
        raise _not_in_use(c, "chunked_attention", "attention_chunk_size")
    return Chunk(tokens)


def _not_in_use(c: Config, layer_type: str, key: str) -> LongspanError:
    off = " (use_sliding_window is false)" if c.find(key)[1] is not None else ""
    return LongspanError(f"{c.where}: layer_types has {layer_type} but no {key} is in use{off}; give {key} in tokens")


def sliding_window(c: Config) -> int | None:
    """Tokens of the window, None where it is off."""
    # Only the config classes that have the switch look at it.
    if "use_sliding_window" in c.defaults and not c.flag("use_sliding_window"):
        return None
    return c.optional("sliding_window")


# MLPs.


def dense(weights: Weights, *, gated: bool = True) -> MlpOf:
    """One MLP in every layer."""
    return MlpOf(lambda c, layer: Dense(c.ffn, gated), weights)


def experts(
    weights: Weights,
    sparse: Callable[[Config, int], bool] = lambda c, layer: True,
    *,
    ffn: str = "moe_intermediate_size",
    shared: Callable[[Config], int] = lambda c: 0,
) -> MlpOf:
    """Experts in the layers that `sparse` names, a dense MLP in the others.

    Args:
        weights: of either.
        sparse: whether a layer has experts.
        ffn: the key of an expert's intermediate size.
        shared: intermediate size of the shared experts.
    """

    def build(c: Config, layer: int) -> Dense | Experts:
        if not sparse(c, layer):
            return Dense(c.ffn)
        routed, chosen = c.experts, c.count("num_experts_per_tok")
        if chosen > routed:
            raise LongspanError(f"{c.where}: num_experts_per_tok={chosen} is more than the {routed} experts of a layer")
        return Experts(c.count(ffn), experts=routed, per_token=chosen, shared_ffn=shared(c))

    return MlpOf(build, weights)


def every_step(c: Config, layer: int) -> bool:
    """Experts in every so-manieth layer that is not named as dense."""
    without = c.find("mlp_only_layers")[1] or ()
    return layer not in without and c.experts > 0 and (layer + 1) % c.count("decoder_sparse_step") == 0


# Which layer is of which type.


def sliding_everywhere(c: Config, layer: int) -> str:
    """A window in every layer, if there is one."""
    return "full_attention" if sliding_window(c) is None else "sliding_attention"


def sliding_first(c: Config, layer: int) -> str:
    """Every other layer, from the first on."""
    return "full_attention" if layer % 2 else "sliding_attention"


def full_at_intervals(interval: str, other: str, c: Config, layer: int) -> str:
    """The last of every so many layers is full, the others of another type."""
    return other if (layer + 1) % c.count(interval) else "full_attention"
