"""Apply tensor parallelism to a Hugging Face model: shard its weights, and run collectives around its layers.

Two styles of the residual stream:

    "tp"           every rank holds all tokens: an all-reduce after attention and MLP (arXiv:1909.08053)
    "megatron-sp"  each rank holds its own tokens, also in norms: an all-gather before, a reduce-scatter after
                   (arXiv:2205.05198)

All ranks of a tensor group get the same tokens; attention runs on this rank's heads, over ring and ulysses as without a
tensor axis. A weight is a `DTensor` for FSDP, optimizers and checkpoints, and a plain tensor for its module while that
runs (`longspan.comm.tensor`). torch's own parallel styles make DTensors of activations, which the memory
options do not support, and all-reduce the gradient of a layer's input once per matmul; once per layer is enough.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import PreTrainedModel

from longspan.comm.mesh import SequenceSharding
from longspan.comm.tensor import Parts, Rule, Shards, TensorGroup
from longspan.compat.torch_api import not_compiled, own_parameters
from longspan.core.errors import LongspanError
from longspan.core.experts import ExpertLayout
from longspan.core.tile_sizes import even_span
from longspan.hf.batch.shard import take_info
from longspan.hf.cache.cached import last_tokens
from longspan.hf.cache.kv_cache import CachedInfo
from longspan.hf.forward.stage import ForwardCall, Stage
from longspan.hf.weights.experts import ExpertParallel
from longspan.hf.weights.tensor_rules import TensorRules, TensorStyle
from longspan.losses.deferred_logits import Head, VocabShard


class TensorParallel(Stage):
    """Shard a model over its tensor group, before FSDP, and hook its layers."""

    def __init__(
        self, model: PreTrainedModel, sp: SequenceSharding, style: TensorStyle, rules: TensorRules, head: Head | None
    ) -> None:
        self.sp, self.style = sp, style
        self.group = TensorGroup.of(sp.mesh.get_group("tensor"))  # type: ignore[union-attr]
        self.mesh: DeviceMesh = sp.mesh["tensor"]  # type: ignore[index]
        self.tokens = 0  # in this rank's sequence shard, in the current forward
        self._shard_weights(model, rules.of_parameters, rules.adapted)
        for path, kind in rules.regions.items():
            region = model.get_submodule(path)
            enter, leave = self._moe_hooks() if kind == "moe" else (self._enter, self._leave)
            region.register_forward_pre_hook(not_compiled(enter), with_kwargs=True)
            region.register_forward_hook(not_compiled(leave))
        for path in rules.experts:
            experts: Any = model.get_submodule(path)
            layout = ExpertLayout(experts.num_experts, self.group.size, self.group.size)
            start, stop = even_span(layout.experts, self.group.rank, self.group.size)
            ExpertParallel(experts, self.group, layout, stop - start)
        for path, parts in rules.norms.items():
            weights = torch.tensor(_weights(parts, self.group.rank), device=sp.device)
            self._normalize_all_heads(model.get_submodule(path), weights, parts.length)
        for path in rules.fused:
            layer: Any = model.get_submodule(path)  # it splits the output of its fused projection by these
            layer.config, heads = copy.copy(layer.config), rules.heads[self.group.rank]
            layer.config.num_attention_heads = heads.q_heads
            layer.config.num_key_value_heads = layer.num_key_value_heads = heads.kv_heads
        self._set_embedding(model.get_input_embeddings())
        assert head is not None
        self._set_head(head)

    def _shard_weights(self, model: nn.Module, rules: dict[str, Rule], adapted: list[str]) -> None:
        made: dict[int, tuple[nn.Parameter, Rule]] = {}
        for path, module in model.named_modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                if not buffer.is_meta:
                    setattr(module, name, buffer.to(self.sp.device))
            own = dict[str, Rule]()
            seen = own_parameters(module)
            for name, p in list(module.named_parameters(recurse=False)):
                if id(p) not in made:
                    rule = rules[f"{path}.{name}".lstrip(".")]
                    made[id(p)] = self._shard(p, rule), rule
                seen[name], own[name] = made[id(p)]
            if own:
                shards = Shards(module, self.group, own)
                module.longspan_shards = shards
                called = next((x for x in adapted if f"{path}.".startswith(f"{x}.")), path)
                reader = model.get_submodule(called)
                reader.register_forward_pre_hook(not_compiled(lambda *_, shards=shards: shards.show()))
                hide = not_compiled(lambda *_, shards=shards: shards.hide())
                reader.register_forward_hook(hide, always_call=True)

    def _shard(self, p: nn.Parameter, rule: Rule) -> nn.Parameter:
        placement = Replicate() if rule.dim is None else Shard(rule.dim)
        full = p.detach().to(self.sp.device) if not p.is_meta else p.detach()
        shard = distribute_tensor(full, self.mesh, [placement], src_data_rank=None)
        parameter = nn.Parameter(shard.clone(), requires_grad=p.requires_grad)
        parameter.__dict__.update(p.__dict__)
        return parameter

    # --- around a layer's parts

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before attention or MLP: return the hidden states of all tokens."""

        def all_tokens(x: Tensor) -> Tensor:
            if self.style == "tp":
                return self.group.copy_in(x)
            x = self.group.gather_tokens(x)
            layer = getattr(module, "longspan_layer", None)  # attention drops padded tokens
            if layer is None and "longspan" not in kwargs:
                return x  # for others they have no effect
            info = take_info(getattr(layer, "name", ""), dict(kwargs))
            return x[:, : info.local_length]

        return _with_hidden(args, kwargs, all_tokens)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """After attention or MLP: sum over the ranks."""
        return _with_first(output, self.group.sum_out if self.style == "tp" else self.group.scatter_tokens)

    def _moe_hooks(self) -> tuple[Any, Any]:
        """Return hooks of a mixture of experts: in both styles, router and experts work on my tokens."""
        length, rows = [0], [0]

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            def mine(x: Tensor) -> Tensor:
                rows[0], length[0] = x.shape[:2]
                return self.group.my_tokens(x)

            return _with_hidden(args, kwargs, mine) if self.style == "tp" else None

        def all_tokens(x: Tensor) -> Tensor:  # Llama-4's experts return [rows * tokens, hidden]
            return self.group.whole_tokens(x.reshape(rows[0], -1, x.shape[-1]), length[0])

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            if self.style != "tp":
                return output
            return _with_first(output, all_tokens)

        return enter, leave

    def _normalize_all_heads(self, norm: Any, weights: Tensor, width: int) -> None:
        """Make a norm over all heads, which sees this rank's entries, use the mean square over all ranks.

        `weights` are of each entry in the sum over all ranks, whose entries number `width`.
        """
        compute, epsilon = type(norm).forward, norm.variance_epsilon

        def forward(x: Tensor) -> Tensor:
            squares = x.to(torch.float32).pow(2)  # as transformers' norms do, whatever the dtype
            total = self.group.sum_out((squares * weights).sum(-1, keepdim=True))
            # Each rank normalizes its own heads by the total, so its gradient is the sum of theirs.
            mean = self.group.copy_in(total) / width
            norm.variance_epsilon = mean - squares.mean(-1, keepdim=True) + epsilon
            try:
                return compute(norm, x)  # type: ignore[no-any-return]
            finally:
                norm.variance_epsilon = epsilon

        norm.forward = forward  # also replaces a tiled forward: this norm does not run tile by tile

    # --- the vocabulary

    def _set_embedding(self, embedding: Any) -> None:
        part = VocabShard.of(self.group, embedding.num_embeddings)
        pad = embedding.padding_idx
        embedding.padding_idx = pad - part.start if pad is not None and 0 <= pad - part.start < part.width else None
        mine: list[Tensor] = []

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            (ids,) = args or kwargs.values()
            self.tokens = ids.shape[1]
            is_mine, at = part.find(ids)
            mine[:] = [is_mine]
            return (at[:, 0],), {}

        def leave(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            x = torch.where(mine.pop()[..., None], output, 0)
            # No view: FSDP hooks the outputs of a module.
            return self.group.sum_out(x) if self.style == "tp" else self.group.scatter_tokens(x).clone()

        embedding.register_forward_pre_hook(not_compiled(enter), with_kwargs=True)
        embedding.register_forward_hook(not_compiled(leave))

    def _set_head(self, head: Head) -> None:
        assert isinstance(head.module, nn.Linear)
        size = head.module.out_features
        head.vocab_shard = VocabShard.of(self.group, size)

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            def all_tokens(x: Tensor) -> Tensor:
                if self.style == "tp":
                    return self.group.copy_in(x)
                return self.group.gather_tokens(x)[:, : self.tokens]

            return _with_hidden(args, kwargs, all_tokens)

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            return self.group.whole_last(output, size).contiguous() if isinstance(output, Tensor) else output

        head.module.register_forward_pre_hook(enter, with_kwargs=True)
        head.module.register_forward_hook(leave)

    def last_tokens(self, hidden: Tensor, info: CachedInfo) -> Tensor:
        """As `longspan.hf.cache.cached.last_tokens`, for hidden states of the residual stream."""
        if self.style == "tp":
            return last_tokens(hidden, info)
        last = last_tokens(self.group.gather_tokens(hidden)[:, : self.tokens], info)
        self.tokens = last.shape[1]  # for the head
        return self.group.my_tokens(last)

    def check(self, call: ForwardCall) -> None:
        """Raise for `inputs_embeds` and `output_hidden_states`, which "megatron-sp" would shard by tokens."""
        if self.style == "tp":
            return
        hidden = call.batch.get("output_hidden_states")
        if hidden is None:
            hidden = getattr(call.model.config, "output_hidden_states", False)
        if hidden or call.batch.get("inputs_embeds") is not None:
            raise LongspanError(
                f"{'output_hidden_states=True' if hidden else 'inputs_embeds'}: with tensor_style='megatron-sp' each "
                "rank has the hidden states of its own tokens only; use tensor_style='tp', or leave it out"
            )

    def my_rows(self, real: Tensor) -> Tensor:
        """Return, of flags `[B, L]` of all tokens, those of my tokens, which this rank routes."""
        short = self.group.size * self.group.tokens(real.shape[1]) - real.shape[1]
        return F.pad(real, (0, short)).chunk(self.group.size, 1)[self.group.rank]


def _with_hidden(args: tuple[Any, ...], kwargs: dict[str, Any], change: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
    return args, {**kwargs, name: change(kwargs[name])}


def _with_first(output: Any, change: Any) -> Any:
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


def _weights(parts: Parts, rank: int) -> list[float]:
    """Return for each entry of this rank: 1 over the number of ranks that hold it."""
    spans = [span for spans in parts.spans for span in spans]
    mine = [entry for start, stop in parts.spans[rank] for entry in range(start, stop)]
    return [1 / sum(start <= entry < stop for start, stop in spans) for entry in mine]
