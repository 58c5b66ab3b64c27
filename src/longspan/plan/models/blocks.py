"""Building blocks of families: mixers and MLPs from a config, which layer has which, and their weights.

Weights are named as transformers 5 names them, in the order of its modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

from longspan.core.errors import LongspanError
from longspan.plan.layers import AttendedKeys, Chunk, Mixer, Mlp, Parameter, Softmax, Window
from longspan.plan.models.family import Config, Part

Weights = Callable[[Config, Any], Iterator[Parameter]]


# Mixers.


def grouped(c: Config) -> Softmax:
    """Return grouped-query attention."""
    q = c.count("num_attention_heads")
    kv = c.optional("num_key_value_heads") or q
    c.divides("num_attention_heads", "num_key_value_heads", q, kv)
    dim = c.optional("head_dim")
    if dim is None:
        c.divides("hidden_size", "num_attention_heads", c.d, q)
        dim = c.d // q
    return Softmax(q, kv, dim, dim)


def all_of_hidden(c: Config) -> Softmax:
    """Return multi-head attention, with heads of `hidden_size / num_attention_heads`."""
    q = c.count("num_attention_heads")
    c.divides("hidden_size", "num_attention_heads", c.d, q)
    return Softmax(q, q, c.d // q, c.d // q)


def softmax(
    weights: Weights, heads: Callable[[Config], Softmax] = grouped, *, window: bool = True, chunk: bool = False
) -> dict[str, Part]:
    """Return softmax attention by layer type: full, sliding window, and chunked if asked for."""
    full = Part(heads, weights)
    mixers = {"full_attention": full, "attention": full}
    if window:
        mixers["sliding_attention"] = Part(lambda c: replace(heads(c), keys=_window(c)), weights)
    if chunk:
        mixers["chunked_attention"] = Part(lambda c: replace(heads(c), keys=_chunk(c)), weights)
    return mixers


NO_MIXER = Part(lambda c: Mixer(), lambda c, mixer: iter(()))
"""Of a layer that is an MLP alone."""


def _window(c: Config) -> AttendedKeys:
    tokens = sliding_window(c)
    if tokens is None:
        raise _not_in_use(c, "sliding_attention", "sliding_window")
    return Window(tokens)


def _chunk(c: Config) -> AttendedKeys:
    tokens = c.optional("attention_chunk_size")
    if tokens is None:
        raise _not_in_use(c, "chunked_attention", "attention_chunk_size")
    return Chunk(tokens)


def _not_in_use(c: Config, layer_type: str, key: str) -> LongspanError:
    off = " (use_sliding_window is false)" if c.find(key)[1] is not None else ""
    return LongspanError(f"{c.where}: layer_types has {layer_type} but no {key} is in use{off}; set {key} in tokens")


def sliding_window(c: Config) -> int | None:
    """Return the window in tokens, or None if it is off."""
    # Only some config classes have this switch.
    if "use_sliding_window" in c.defaults and not c.flag("use_sliding_window"):
        return None
    return c.optional("sliding_window")


# MLPs.


def dense(weights: Weights, *, gated: bool = True) -> Part:
    """Return a dense MLP for every layer."""
    return Part(lambda c, layer: Mlp(c.ffn, gated), weights)


def experts(
    weights: Weights,
    sparse: Callable[[Config, int], bool] = lambda c, layer: True,
    *,
    ffn: str = "moe_intermediate_size",
    shared: Callable[[Config], int] = lambda c: 0,
) -> Part:
    """Return experts for the layers that `sparse` selects, and a dense MLP for the others.

    `ffn` is the config key of an expert's intermediate size; `shared` returns that of the shared experts.
    """

    def build(c: Config, layer: int) -> Mlp:
        if not sparse(c, layer):
            return Mlp(c.ffn)
        routed, chosen = c.experts, c.count("num_experts_per_tok")
        if chosen > routed:
            raise LongspanError(f"{c.where}: num_experts_per_tok={chosen} is more than the {routed} experts of a layer")
        return Mlp(c.count(ffn), experts=routed, per_token=chosen, shared_ffn=shared(c))

    return Part(build, weights)


def every_step(c: Config, layer: int) -> bool:
    """Whether a layer is one of every `decoder_sparse_step` and is not listed in `mlp_only_layers`."""
    without = c.find("mlp_only_layers")[1] or ()
    return layer not in without and c.experts > 0 and (layer + 1) % c.count("decoder_sparse_step") == 0


# Which layer is of which type.


def sliding_everywhere(c: Config, layer: int) -> str:
    """A window in every layer, if the config has one."""
    return "full_attention" if sliding_window(c) is None else "sliding_attention"


def sliding_first(c: Config, layer: int) -> str:
    """A window in every other layer, starting with the first."""
    return "full_attention" if layer % 2 else "sliding_attention"


def full_at_intervals(interval: str, other: str, c: Config, layer: int) -> str:
    """Full attention in every n-th layer, n being the value of `interval`, and `other` in between."""
    return other if (layer + 1) % c.count(interval) else "full_attention"


# Weights.


def linear(name: str, inputs: int, outputs: int, bias: bool = False) -> Iterator[Parameter]:
    """Yield the weights of a linear layer."""
    yield Parameter(f"{name}.weight", (outputs, inputs))
    if bias:
        yield Parameter(f"{name}.bias", (outputs,))


def norm(name: str, size: int, bias: bool = False) -> Iterator[Parameter]:
    """Yield the weights of an RMSNorm, or with a bias of a LayerNorm."""
    yield Parameter(f"{name}.weight", (size,))
    if bias:
        yield Parameter(f"{name}.bias", (size,))


def attention(
    c: Config,
    mixer: Softmax,
    *,
    qkv_bias: bool | None = None,
    out_bias: bool | None = None,
    qk_norm: Literal["no", "head", "all heads"] = "no",
    gate: bool = False,
) -> Iterator[Parameter]:
    """Yield separate projections.

    A bias of None follows `attention_bias`; a gate doubles the query projection.
    """
    q, kv, dim = mixer.q_heads, mixer.kv_heads, mixer.head_dim
    qkv_bias = c.flag("attention_bias") if qkv_bias is None else qkv_bias
    out_bias = c.flag("attention_bias") if out_bias is None else out_bias
    if mixer.sinks:
        yield Parameter("self_attn.sinks", (q,))
    yield from linear("self_attn.q_proj", c.d, q * dim * (2 if gate else 1), qkv_bias)
    yield from linear("self_attn.k_proj", c.d, kv * dim, qkv_bias)
    yield from linear("self_attn.v_proj", c.d, kv * dim, qkv_bias)
    yield from linear("self_attn.o_proj", q * dim, c.d, out_bias)
    if qk_norm != "no":
        yield from norm("self_attn.q_norm", dim if qk_norm == "head" else q * dim)
        yield from norm("self_attn.k_norm", dim if qk_norm == "head" else kv * dim)


def gated(name: str, d: int, ffn: int, bias: bool = False) -> Iterator[Parameter]:
    """Yield the matrices gate, up and down."""
    yield from linear(f"{name}.gate_proj", d, ffn, bias)
    yield from linear(f"{name}.up_proj", d, ffn, bias)
    yield from linear(f"{name}.down_proj", ffn, d, bias)


def gated_mlp(c: Config, mlp: Mlp) -> Iterator[Parameter]:
    """Yield a dense gated MLP without biases."""
    yield from gated("mlp", c.d, mlp.ffn)


def routed_experts(c: Config, mlp: Mlp, router_last: bool = False) -> Iterator[Parameter]:
    """Yield a router and its experts, stacked in two tensors; in a dense layer a dense MLP."""
    if not mlp.experts:
        yield from gated_mlp(c, mlp)
        return
    router = Parameter("mlp.gate.weight", (mlp.experts, c.d))
    if not router_last:
        yield router
    yield Parameter("mlp.experts.gate_up_proj", (mlp.experts, 2 * mlp.ffn, c.d))
    yield Parameter("mlp.experts.down_proj", (mlp.experts, c.d, mlp.ffn))
    if router_last:
        yield router
