"""Replacements for the functions and methods that transformers' recurrent layers call.

Each is called as `replacement(binding, original, *arguments of the original)`, and runs the original on the fragments
of a sharded sequence (`longspan.mixers`).

Shape suffixes: B batch, T tokens, H heads, G groups of heads that share B and C, K state size, V value dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch.nn.functional as F
from torch import Tensor

from longspan.compat.friends_api import fla_over_ranks
from longspan.compat.transformers_api import add_mixer_function
from longspan.core.errors import LongspanError
from longspan.mixers.decayed_state import read_decayed
from longspan.mixers.fla import DeltaRuleFunction
from longspan.mixers.linear_attention import default_mixer
from longspan.mixers.mixer import ChunkFunction, Local, Tokens
from longspan.mixers.plain_torch import LinearAttention
from longspan.mixers.state_passing import depend

if TYPE_CHECKING:
    from longspan.hf.forward.mixers import MixerBinding

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any] | str)


def _convolution(
    layer: MixerBinding,
    original: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """Convolve `x [B, channels, T]`, each fragment after the last tokens before it."""

    def convolve(x_BCT: Tensor) -> Tensor:
        return original(x_BCT, weight, bias, activation=activation)

    return layer.convolve(convolve, weight.shape[-1] - 1, x)


def _delta_rule(
    layer: MixerBinding,
    original: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: None = None,
    *,
    exchanging: Callable[..., Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run Gated DeltaNet's, KDA's or a registered function on fragments."""
    _check_initial_state(layer, initial_state)
    per_token = next(
        (name for name, x in options.items() if isinstance(x, Tensor) and x.shape[:2] == v.shape[:2]), None
    )
    if per_token is not None:
        raise LongspanError(
            f"layer {layer.name} passes `{per_token}` {tuple(options[per_token].shape)}, a tensor with a value per "
            f"token; only q, k, v, g and beta are cut into documents: merge it into one of these"
        )
    v = depend(v, *(x for x in options.values() if isinstance(x, Tensor)))
    return layer.run_from_state(DeltaRuleFunction(original, options, exchanging=exchanging), Tokens(q, k, v, g, beta))


def _gated_delta_rule(
    layer: MixerBinding,
    original: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run Gated DeltaNet or KDA, by flash-linear-attention's kernels where these run, else by `LinearAttention`.

    `LinearAttention` computes the same in plain torch. transformers' plain functions, with the values widened by the
    identity, take up to 1.8 times as long, forward and backward.
    """
    tokens = Tokens(q, k, v, g, beta)
    if isinstance(default_mixer(tokens), ChunkFunction):
        options["use_qk_l2norm_in_kernel"] = use_qk_l2norm_in_kernel
        over_ranks = fla_over_ranks(g.dim() == 4, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
        return _delta_rule(layer, original, *tokens, initial_state, exchanging=over_ranks, **options)
    _check_initial_state(layer, initial_state)
    if use_qk_l2norm_in_kernel:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q.float(), k.float()))
    return layer.run_from_state(LinearAttention(), Tokens(q * q.shape[-1] ** -0.5, k, v, g, beta))


def _mamba2(
    layer: MixerBinding,
    original: Callable[..., Any],
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: None = None,
    dt_bias: Tensor | None = None,
    initial_states: None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run Mamba-2's scan: `x [B, T, H, V]`, `dt [B, T, H]`, `A [H]`, `B` and `C` `[B, T, G, K]`."""
    options = {"chunk_size": chunk_size, "D": D, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
    x = depend(x, A, D, dt_bias)  # a rank without fragments needs gradients, and the backward's collective, too
    state_BHVK = _cached_state(layer)
    initial = None if state_BHVK is None else state_BHVK.mT
    out, final_BHKV = layer.run(_Mamba2(original, A, dt_bias, options), Tokens(C, B, x, dt), initial)
    return out if final_BHKV is None else (out, final_BHKV.mT.contiguous())


def _mamba1(
    layer: MixerBinding,
    original: Callable[..., Any],
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run Mamba's scan: `x`, `dt` and `z` `[B, channels, T]`, `A [channels, K]`, `B` and `C` `[B, K, T]`."""
    x = depend(x, A, D, delta_bias)  # as in Mamba-2
    tokens = Tokens(C.mT.unsqueeze(2), B.mT.unsqueeze(2), x.mT.unsqueeze(3), dt.mT)
    mixer = _Mamba1(original, A, D, delta_bias, delta_softplus, options)
    state_BHK = _cached_state(layer)
    if state_BHK is not None and state_BHK.dim() > 3:  # Zamba stacks those of several scans
        state_BHK = state_BHK[:, layer.calls["mamba_selective_scan"] - 1]
    out, final = layer.run(mixer, tokens, None if state_BHK is None else state_BHK.unsqueeze(3))
    out = out.squeeze(3).mT
    out = out if z is None else out * F.silu(z)
    return out if final is None else (out, final.squeeze(3))


def _lightning(
    layer: MixerBinding, original: Callable[..., Any], hidden_states: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Run MiniMax's lightning attention, whose own forward holds its loop over blocks of tokens."""
    attention: Any = original.__self__  # type: ignore[attr-defined]
    qkv_BTHX = attention.act_fn(attention.qkv_proj(hidden_states)).unflatten(-1, (attention.num_attention_heads, -1))
    q, k, v = qkv_BTHX.chunk(3, -1)
    decay_BTH = -attention.slope_rate.view(1, 1, -1).expand(q.shape[:3])
    tokens = Tokens(q, k, v, decay_BTH)
    out = attention.norm(layer.run_from_state(default_mixer(tokens), tokens)[0].flatten(2))
    return attention.out_proj(attention.output_gate(hidden_states).sigmoid() * out), None


def no_shortcut(layer: MixerBinding, original: Callable[..., Any], *_: Any, **__: Any) -> None:
    """Return None, as without kernels: fused, convolution and scan cannot be sharded."""


REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "chunk_kimi_delta_attention": _gated_delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba1,
    "mamba2_split_conv1d_scan_combined": no_shortcut,
    "mamba_inner_fn": no_shortcut,
    "MiniMaxLightningAttention.forward": _lightning,
}


def register_mixer(function: FunctionT) -> FunctionT:
    """Register a recurrent function, so that `parallelize` shards the layers that call it.

    Call this on every rank, before `parallelize`. Only q, k, v, g and beta may have a value per token, and every
    document starts from a zero state.

    Args:
        function: the function (so this serves as its decorator), or the name by which the layers' file calls it. Its
            arguments are those of `ChunkFunction.function`.

    Returns:
        `function`.

    Raises:
        LongspanError: for a name that longspan itself replaces, or an argument that is neither a function nor a name.
    """
    name = getattr(function, "__name__", function)
    if not isinstance(name, str) or not name.isidentifier():
        raise LongspanError(f"register_mixer needs a function or its name, got {function!r}")
    if REPLACEMENTS.setdefault(name, _delta_rule) is not _delta_rule:
        raise LongspanError(f"there is a mixer {name!r} already; give your function another name")
    add_mixer_function(name)
    return function


def _check_initial_state(layer: MixerBinding, initial_state: Tensor | None) -> None:
    if initial_state is not None and initial_state is not _cached_state(layer):
        raise LongspanError(
            f"layer {layer.name} passes an initial state; sharded, every document starts from zero: leave it out"
        )


def _cached_state(layer: MixerBinding) -> Tensor | None:
    """Return the state of the tokens before this forward's, in the layer's own form."""
    return None if layer.cached is None else layer.cached.recurrent


@dataclass(frozen=True)
class _Mamba2:
    """Mamba-2's scan as a `Mixer`: a state decays by one factor per head and token.

    `q` is C, `k` is B, `decay` is dt as the model computed it.
    """

    function: Callable[..., tuple[Tensor, Tensor]]
    A_H: Tensor
    bias_H: Tensor | None
    options: Mapping[str, Any]
    causal: bool = True

    def columns(self, tokens: Tokens) -> int:
        return 1

    def local(self, tokens: Tokens, state: Tensor | None, receives: bool) -> Local:
        assert tokens.decay is not None
        out_BTHV, final_BHVK = self.function(
            tokens.v, tokens.decay, self.A_H, tokens.k, tokens.q, dt_bias=self.bias_H,
            initial_states=None if state is None else state.mT, return_final_states=True, **self.options,
        )  # fmt: skip
        final, transition = final_BHVK.mT.to(tokens.state_dtype), None
        _, K, V = tokens.state_shape
        if receives:
            dt_BTH = _time_steps(tokens.decay, self.bias_H, self.options["dt_softplus"])
            log_kept_BTH = (self.A_H * dt_BTH.clamp(*self.options["dt_limit"]).float()).double().cumsum(1)
            kept_BTH = log_kept_BTH.exp().to(tokens.state_dtype)
            transition = kept_BTH[:, -1, :, None, None].expand(-1, -1, K, -1)

        def finish(entered_BHKV: Tensor | None) -> Tensor:
            if entered_BHKV is None:
                return out_BTHV
            groups = tokens.q.shape[2]
            state_BGKW = entered_BHKV.unflatten(1, (groups, -1)).transpose(2, 3).flatten(3)  # W: heads of a group, V
            read_BTGW = (tokens.q.to(kept_BTH.dtype).transpose(1, 2) @ state_BGKW).transpose(1, 2)
            read_BTHV: Tensor = read_BTGW.unflatten(3, (-1, V)).flatten(2, 3)
            return out_BTHV + read_BTHV * kept_BTH.unsqueeze(-1)

        return Local(final, transition, finish)


@dataclass(frozen=True)
class _Mamba1:
    """Mamba's scan as a `Mixer`: every channel is a head with one value, and a factor per state and token.

    `q` is C, `k` is B, `decay` is dt as the model computed it.
    """

    function: Callable[..., tuple[Tensor, Tensor]]
    A_HK: Tensor
    D_H: Tensor | None
    bias_H: Tensor | None
    softplus: bool
    options: Mapping[str, Any]
    causal: bool = True

    def columns(self, tokens: Tokens) -> int:
        return 1

    def local(self, tokens: Tokens, state: Tensor | None, receives: bool) -> Local:
        assert tokens.decay is not None
        x_BHT, dt_BHT = tokens.v.squeeze(3).mT, tokens.decay.mT
        B_BKT, C_BKT = tokens.k.squeeze(2).mT, tokens.q.squeeze(2).mT
        out_BHT, final_BHK = self.function(
            x_BHT, dt_BHT, self.A_HK, B_BKT, C_BKT, D=self.D_H, delta_bias=self.bias_H, delta_softplus=self.softplus,
            return_last_state=True, **self.options,
        )  # fmt: skip
        final, transition = final_BHK.unsqueeze(3).to(tokens.state_dtype), None
        if receives or state is not None:
            A_HK = self.A_HK.to(final.dtype)
            since_BTH = _time_steps(tokens.decay, self.bias_H, self.softplus).to(final.dtype).cumsum(1)
            transition = (since_BTH[:, -1].unsqueeze(-1) * A_HK).exp().unsqueeze(3)
            if state is not None:  # the function starts from zero
                final = final + transition * state

        def finish(entered_BHKV: Tensor | None) -> Tensor:
            out_BTH = out_BHT.mT
            entered_BHKV = state if entered_BHKV is None else entered_BHKV
            if entered_BHKV is not None:
                q_BTK = tokens.q.squeeze(2).to(final.dtype)
                out_BTH = out_BTH + read_decayed(since_BTH, A_HK, entered_BHKV.squeeze(3), q_BTK)
            return out_BTH.unsqueeze(3)

        return Local(final, transition, finish)


def _time_steps(dt_BTH: Tensor, bias_H: Tensor | None, softplus: bool) -> Tensor:
    if bias_H is not None:
        dt_BTH = dt_BTH + bias_H.to(dt_BTH.dtype)
    return F.softplus(dt_BTH) if softplus else dt_BTH
