"""Building blocks of families: weights, module by module, named as transformers 5 names them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from longspan.plan.layers import Experts, Mlp, Softmax
from longspan.plan.models.config import Config
from longspan.plan.models.shape import Parameter


def linear(name: str, inputs: int, outputs: int, bias: bool = False) -> Iterator[Parameter]:
    """A matrix product."""
    yield Parameter(f"{name}.weight", (outputs, inputs))
    if bias:
        yield Parameter(f"{name}.bias", (outputs,))


def norm(name: str, size: int, bias: bool = False) -> Iterator[Parameter]:
    """An RMSNorm, or with a bias a LayerNorm."""
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
    """Separate projections. A bias of None is as `attention_bias` says; a gate comes with the queries' projection."""
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
    """Three matrices: gate, up, down."""
    yield from linear(f"{name}.gate_proj", d, ffn, bias)
    yield from linear(f"{name}.up_proj", d, ffn, bias)
    yield from linear(f"{name}.down_proj", ffn, d, bias)


def gated_mlp(c: Config, mlp: Mlp) -> Iterator[Parameter]:
    """A dense MLP without biases."""
    yield from gated("mlp", c.d, mlp.ffn)


def routed_experts(c: Config, mlp: Mlp, router_last: bool = False) -> Iterator[Parameter]:
    """A router and its experts, stacked in two tensors; in a dense layer a dense MLP."""
    if not isinstance(mlp, Experts):
        yield from gated_mlp(c, mlp)
        return
    router = Parameter("mlp.gate.weight", (mlp.experts, c.d))
    if not router_last:
        yield router
    yield Parameter("mlp.experts.gate_up_proj", (mlp.experts, 2 * mlp.ffn, c.d))
    yield Parameter("mlp.experts.down_proj", (mlp.experts, c.d, mlp.ffn))
    if router_last:
        yield router
