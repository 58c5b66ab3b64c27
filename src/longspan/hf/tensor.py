"""Tensor parallelism of a Hugging Face model: which weight is cut where, and what is sent around a layer.

The weights of attention and MLP are cut over the mesh's `tensor` axis as the model's own plan says (transformers'
`base_model_tp_plan`): the first products by their outputs (columns), the last by their inputs (rows), embedding and
head by the vocabulary, experts one by one. Two styles say how the parts of a layer's output become the residual stream:

    "tp"           every rank holds the whole stream: an all-reduce behind attention and MLP (arXiv:1909.08053)
    "megatron-sp"  each rank holds its tokens of it, norms included: an all-gather before, a reduce-scatter behind
                   (arXiv:2205.05198)

All ranks of a tensor group are given the same tokens; attention runs on this rank's heads, over ring and ulysses as
ever. A weight is a `DTensor` to FSDP, optimizers and checkpoints, and a plain tensor to its module while that runs
(`longspan.memory.shards`): torch's own styles make DTensors of activations, which the levers of memory do not take,
and sum the gradient of a layer's input once for each of its first products, where once is enough.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from longspan.comm.tensor import TensorGroup
from longspan.compat.torch_api import own_parameters
from longspan.core.checked import spell
from longspan.core.errors import LongspanError
from longspan.hf.experts import ExpertParallel
from longspan.hf.kv_cache import CachedInfo, last_token
from longspan.hf.support import attention_layers, decoder_of, draws
from longspan.memory.shards import Rule, Shards
from longspan.memory.vocabulary import Vocabulary

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from longspan.comm.mesh import SequenceSharding
    from longspan.memory.logits import Head

TensorStyle = Literal["tp", "megatron-sp"]
STYLES = ("tp", "megatron-sp")

_QKV = {f"layers.*.self_attn.{x}_proj": "colwise" for x in "qkv"}
PLANS: dict[str, dict[str, str]] = {
    "gpt_oss": {**_QKV, "layers.*.self_attn.o_proj": "rowwise", "layers.*.mlp.experts": "moe_tp_experts"},
}
"""Plans of families that transformers brings none for, by `model_type`."""

_EXPERTS = "moe_tp_experts"
_COVERED = ("packed_colwise", "packed_rowwise", "colwise", "rowwise", "grouped_gemm")  # of weights inside experts
_GRADIENT = "replicated_with_grad_allreduce"


@dataclass
class TensorPlan:
    """What `apply_tensor` does to a model.

    Attributes:
        rules: of every parameter, by its name.
        regions: modules that compute with parts of weights, "attention" or "mlp", or with a part of the tokens, "moe".
        experts: modules of which each rank holds some experts.
        vocabulary: ids of the embedding.
    """

    rules: dict[str, Rule] = field(default_factory=dict)
    regions: dict[str, str] = field(default_factory=dict)
    experts: list[str] = field(default_factory=list)
    vocabulary: int = 0


def tensor_plan(model: PreTrainedModel, size: int, rank: int, style: TensorStyle, others: int = 1) -> TensorPlan:
    """What becomes of each weight, or what speaks against it; nothing is changed.

    Args:
        model: before anything is sharded.
        size: ranks of a tensor group.
        rank: this one's place.
        style: of the residual stream.
        others: ranks of the sequence group, for the mesh that is proposed instead.

    Raises:
        LongspanError: naming the layer, with the numbers and a mesh that fits.
    """
    return _Planner(model, size, rank, style, others).plan()


class _Planner:
    def __init__(self, model: PreTrainedModel, size: int, rank: int, style: TensorStyle, others: int) -> None:
        self.model, self.size, self.rank, self.style, self.others = model, size, rank, style, others
        self.name = type(model).__name__
        self.modules = dict(model.named_modules())
        self.names = {module: name for name, module in self.modules.items()}
        self.attention = attention_layers(model)
        self.made = TensorPlan()

    def plan(self) -> TensorPlan:
        styles = self._styles()
        self._check_heads()
        for path, style in styles.items():
            if style == _EXPERTS:
                self._experts(path)
        inside = tuple(f"{path}." for path, kind in self.made.regions.items() if kind == "moe")
        for path, style in styles.items():
            if style in ("colwise", "rowwise") and not path.startswith(inside or ("\0",)):
                self._linear(path, style)
        self._check_regions(styles)
        self._vocabulary()
        self._rest(styles, inside)
        return self.made

    def _styles(self) -> dict[str, str]:
        """The style of every module that the model's plan names."""
        config = self.model.config.get_text_config()
        brought = getattr(config, "base_model_tp_plan", None) or {}
        # The embedding is cut by the vocabulary, whatever a plan says; since 5.24 it is all that some plans name.
        plan = {p: s for p, s in brought.items() if not s.startswith("embedding")} or PLANS.get(config.model_type)
        if not plan:
            self._refuse(f"transformers brings no tensor-parallel plan for {config.model_type} (base_model_tp_plan)")
        decoder, found = self.names[decoder_of(self.model)], dict[str, str]()
        experts = tuple(f"{pattern}." for pattern, style in plan.items() if style == _EXPERTS)
        for pattern, style in plan.items():
            of_experts = pattern.startswith(experts or ("\0",)) and style in _COVERED
            wanted = re.compile(re.escape(f"{decoder}.{pattern}").replace(r"\*", r"[^.]+"))
            for path in self.modules:
                if of_experts or not wanted.fullmatch(path):
                    continue
                if style not in ("colwise", "rowwise", _GRADIENT, _EXPERTS):
                    self._refuse(f"its plan has the style {style!r} for layer {path}, which is not known here")
                found[path] = style
        return found

    def _check_heads(self) -> None:
        config = self.model.config.get_text_config()
        self.q_heads: int = config.num_attention_heads
        self.kv_heads: int = getattr(config, "num_key_value_heads", None) or self.q_heads
        if self.q_heads % self.size:
            self._refuse_size("query heads", self.q_heads)
        if self.kv_heads % self.size and self.size % self.kv_heads:
            self._refuse_size("key and value heads", self.kv_heads, of=("a multiple or a divisor", self.kv_heads))
        for path, layer in self.attention.items():
            own = getattr(layer, "num_key_value_heads", self.kv_heads), getattr(layer, "num_heads", self.q_heads)
            if own != (self.kv_heads, self.q_heads):
                self._refuse(f"layer {path} has {own[1]} query and {own[0]} KV heads, not as its config")

    def _linear(self, path: str, style: str) -> None:
        module = self.modules[path]
        base = getattr(module, "base_layer", module)
        weight = getattr(base, "weight", None)
        if not isinstance(base, nn.Linear) or not isinstance(weight, Tensor) or not weight.is_floating_point():
            self._refuse(f"layer {path} is no linear layer with weights of floating point ({type(base).__name__})")
        at = f"{path}.base_layer" if base is not module else path
        owner = path.rpartition(".")[0]
        attends = owner in self.attention
        width = base.out_features if style == "colwise" else base.in_features
        rows = self._kv_rows(path, base) if attends and style == "colwise" else None
        if rows is None and width % self.size:
            what = "features between its matrices" if not attends else "features of its heads"
            self._refuse_size(f"{what} in {path}", width)
        if style == "colwise":
            cut = Rule(partial=True, rows=rows) if rows is not None else Rule(0)
            self._rule(base, at, weight=cut, bias=cut)
            self._adapters(module, path, Rule(partial=True), cut, cut)
        else:
            self._rule(base, at, weight=Rule(1), bias=Rule(partial=True, first=True))
            self._adapters(module, path, Rule(1), Rule(partial=True), Rule(partial=True, first=True))
        self.made.regions[owner] = "attention" if attends else "mlp"

    def _kv_rows(self, path: str, base: nn.Linear) -> tuple[int, int] | None:
        """Which outputs this rank computes where several ranks share a KV head; None where they do not."""
        if self.kv_heads >= self.size or path.rpartition(".")[2] not in ("k_proj", "v_proj"):
            return None
        width, head = base.out_features // self.kv_heads, self.rank * self.kv_heads // self.size
        return head * width, (head + 1) * width

    def _rule(self, module: nn.Module, path: str, **rules: Rule) -> None:
        for name, _ in module.named_parameters(recurse=False):
            self.made.rules[f"{path}.{name}"] = rules[name]

    def _adapters(self, module: nn.Module, path: str, a: Rule, b: Rule, bias: Rule) -> None:
        """LoRA beside a cut layer: B A x is linear, so parts of either give parts of the sum."""
        for name, p in module.named_parameters():
            kind, _, rest = name.partition(".")
            own = rest.rpartition(".")[2]
            if name in ("weight", "bias") or kind == "base_layer":
                continue
            if kind not in ("lora_A", "lora_B") or own not in ("weight", "bias") or p.dim() != (own == "weight") + 1:
                self._refuse(f"layer {path} has the adapter weight {name}, and only LoRA's A and B can be cut with it")
            rule = a if kind == "lora_A" else bias if own == "bias" else b
            self.made.rules[f"{path}.{name}"] = rule

    def _check_regions(self, styles: dict[str, str]) -> None:
        """Every attention, and every MLP with a first product that is cut, must have a last one that is."""
        for path in self.made.regions:
            if self.made.regions[path] == "moe":
                continue
            found = {style for name, style in styles.items() if name.rpartition(".")[0] == path}
            if not {"colwise", "rowwise"} <= found:
                self._refuse(f"the plan of layer {path} has no first and last product (it has {sorted(found)})")
        for path in self.attention:
            if path not in self.made.regions:
                self._refuse(f"its plan does not say how the attention layer {path} is cut")

    def _experts(self, path: str) -> None:
        module, owner = self.modules[path], path.rpartition(".")[0]
        count = getattr(module, "num_experts", None)
        weights = dict(module.named_parameters(recurse=False))
        inner = [name for name, _ in module.named_parameters() if name not in weights]
        if not isinstance(count, int) or inner or any(len(p) != count for p in weights.values()):
            self._refuse(f"layer {path} ({type(module).__name__}) does not hold its experts in one tensor a weight")
        if count % self.size:
            self._refuse_size(f"experts in {path}", count)
        self._rule(module, path, **dict.fromkeys(weights, Rule(0)))
        self.made.regions[owner] = "moe"
        self.made.experts.append(path)

    def _vocabulary(self) -> None:
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        if self.model.loss_type != "ForCausalLM" or not isinstance(head, nn.Linear):
            self._refuse("a causal language model with a linear head is what can be cut by its vocabulary")
        if not isinstance(embedding, nn.Embedding):
            self._refuse(f"its embedding is a {type(embedding).__name__}")
        for module in (embedding, head):
            entries = len(module.weight)
            if entries % self.size:
                self._refuse_size(f"entries of the vocabulary in {self.names[module]}", entries, pad=True)
            if next(module.children(), None) is not None:
                self._refuse(f"{self.names[module]} has adapters")
            cut = {name: Rule(0) for name, _ in module.named_parameters(recurse=False)}
            self._rule(module, self.names[module], **cut)
        self.made.vocabulary = len(head.weight)

    def _rest(self, styles: dict[str, str], moe: tuple[str, ...]) -> None:
        """Weights that no style names: whole on every rank."""
        shown = {id(self.model.get_parameter(name)) for name in self.made.rules}
        for name, p in self.model.named_parameters():
            owner, _, own = name.rpartition(".")
            if name in self.made.rules or id(p) in shown:
                continue
            region = next((x for x in self.made.regions if name.startswith(f"{x}.")), None)
            if region is None or name.startswith(moe or ("\0",)):
                of_tokens = self.style == "megatron-sp" and self._in_layers(name)
                self.made.rules[name] = Rule(partial=of_tokens or region is not None)
            elif own == "sinks" and owner == region and tuple(p.shape) == (self.q_heads,):
                self.made.rules[name] = Rule(0)
            elif styles.get(owner) == _GRADIENT:
                self.made.rules[name] = Rule(partial=True)
            else:
                self._refuse(f"its plan does not say how {name} is cut")
        for module in self.model.modules():
            if draws(module):
                self._refuse(
                    f"layer {self.names[module]} draws random numbers (dropout), which the ranks of a tensor group "
                    "would need alike; set it to 0"
                )

    def _in_layers(self, name: str) -> bool:
        """Whether a weight is used with tokens of the residual stream."""
        decoder = self.names[decoder_of(self.model)]
        return name.startswith(f"{decoder}.")

    def _refuse(self, why: str) -> NoReturn:
        raise LongspanError(f"`tensor={self.size}` cannot cut {self.name}: {why}; use `{self._mesh(1)}`")

    def _refuse_size(self, what: str, count: int, of: Any = None, pad: bool = False) -> NoReturn:
        total = self.size * self.others
        fits = max(t for t in range(1, self.size) if total % t == 0 and self._fits(t, count))
        more = f", or pad the vocabulary: model.resize_token_embeddings(pad_to_multiple_of={self.size})" if pad else ""
        raise LongspanError(
            f"`tensor={self.size}` does not divide the {count} {what} of {self.name}; try `{self._mesh(fits)}`{more}"
        )

    def _fits(self, t: int, count: int) -> bool:
        counts = (self.q_heads, count)
        kv = self.kv_heads % t == 0 or t % self.kv_heads == 0
        return kv and all(x % t == 0 for x in counts)

    def _mesh(self, tensor: int) -> str:
        return f"tensor={tensor}, ulysses={self.size * self.others // tensor}"


# ---------------------------------------------------------------------------------------------------------------------
# Applying it.


class TensorParallel:
    """A model's tensor group, and what its hooks share.

    Args:
        model: the transformers model, before FSDP.
        sp: its sharding.
        style: of the residual stream.
        plan: of its weights.
        head: the model's head.

    Attributes:
        tokens: of this rank's sequence shard in the forward under way.
    """

    def __init__(
        self, model: PreTrainedModel, sp: SequenceSharding, style: TensorStyle, plan: TensorPlan, head: Head | None
    ) -> None:
        self.sp, self.style = sp, style
        self.group = TensorGroup.of(sp.mesh.get_group("tensor"))  # type: ignore[union-attr]
        self.mesh: DeviceMesh = sp.mesh["tensor"]  # type: ignore[index]
        self.tokens = 0
        self._cut_weights(model, plan.rules)
        for path, kind in plan.regions.items():
            module = model.get_submodule(path)
            enter, leave = self._moe_hooks() if kind == "moe" else (self._enter, self._leave)
            module.register_forward_pre_hook(enter, with_kwargs=True)
            module.register_forward_hook(leave)
        for path in plan.experts:
            ExpertParallel(model.get_submodule(path), self.group)
        self._set_embedding(model.get_input_embeddings())
        assert head is not None
        self._set_head(head, plan.vocabulary)

    def _cut_weights(self, model: nn.Module, rules: dict[str, Rule]) -> None:
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
                    made[id(p)] = self._cut(p, rule), rule
                seen[name], own[name] = made[id(p)]
            if own:
                shards = Shards(module, self.group, own)
                module.longspan_shards = shards
                module.register_forward_pre_hook(lambda *_, shards=shards: shards.show())
                module.register_forward_hook(lambda *_, shards=shards: shards.hide(), always_call=True)

    def _cut(self, p: nn.Parameter, rule: Rule) -> nn.Parameter:
        placement = Replicate() if rule.dim is None else Shard(rule.dim)
        whole = p.detach().to(self.sp.device) if not p.is_meta else p.detach()
        part = distribute_tensor(whole, self.mesh, [placement], src_data_rank=None)
        made = nn.Parameter(part.clone(), requires_grad=p.requires_grad)
        made.__dict__.update(p.__dict__)
        return made

    # --- around a layer's parts

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before attention or MLP: hidden states of all tokens."""

        def whole(x: Tensor) -> Tensor:
            if self.style == "tp":
                return self.group.copy_in(x)
            x = self.group.gather_tokens(x)
            info = kwargs.get("longspan")  # attention cuts what was padded; the rest works on it, to no effect
            return x if info is None else x[:, : self._count(info)]

        return _with_hidden(args, kwargs, whole)

    def _count(self, info: Any) -> int:
        if isinstance(info, CachedInfo) and info.cache is not None:
            return info.cache.tokens_here
        return self.sp.with_layout(info.layout).layout.local_length(info.length)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """After it: the sum of all ranks' parts."""
        return _with_first(output, self.group.sum_out if self.style == "tp" else self.group.scatter_tokens)

    def _moe_hooks(self) -> tuple[Any, Any]:
        """A mixture of experts works on this rank's tokens in both styles: its router, and experts by an All-to-All."""
        length = [0]

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            def mine(x: Tensor) -> Tensor:
                length[0] = x.shape[1]
                return self.group.my_tokens(x)

            return _with_hidden(args, kwargs, mine) if self.style == "tp" else None

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            if self.style != "tp":
                return output
            return _with_first(output, lambda x: self.group.whole_tokens(x, length[0]))

        return enter, leave

    # --- the vocabulary

    def _set_embedding(self, embedding: Any) -> None:
        width = embedding.num_embeddings // self.group.size
        part = Vocabulary(self.group, self.group.rank * width, width)
        pad = embedding.padding_idx
        embedding.padding_idx = pad - part.start if pad is not None and 0 <= pad - part.start < width else None
        mine: list[Tensor] = []

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            (ids,) = args or kwargs.values()
            self.tokens = ids.shape[1]
            found, at = part.find(ids)
            mine[:] = [found]
            return (at[:, 0],), {}

        def leave(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            x = torch.where(mine.pop()[..., None], output, 0)
            # No view: FSDP puts a hook on what a module returns.
            return self.group.sum_out(x) if self.style == "tp" else self.group.scatter_tokens(x).clone()

        embedding.register_forward_pre_hook(enter, with_kwargs=True)
        embedding.register_forward_hook(leave)

    def _set_head(self, head: Head, vocabulary: int) -> None:
        width = vocabulary // self.group.size
        head.vocabulary = Vocabulary(self.group, self.group.rank * width, width)

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            def whole(x: Tensor) -> Tensor:
                if self.style == "tp":
                    return self.group.copy_in(x)
                return self.group.gather_tokens(x)[:, : self.tokens]

            return _with_hidden(args, kwargs, whole)

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            return self.group.whole_last(output).contiguous() if isinstance(output, Tensor) else output

        head.module.register_forward_pre_hook(enter, with_kwargs=True)
        head.module.register_forward_hook(leave)

    def last_token(self, hidden: Tensor, info: CachedInfo) -> Tensor:
        """`longspan.hf.kv_cache.last_token` of hidden states as the residual stream has them, and again such."""
        if self.style == "tp":
            return last_token(hidden, info, self.sp)
        last = last_token(self.group.gather_tokens(hidden)[:, : self.tokens], info, self.sp)
        self.tokens = 1  # for the head
        return self.group.my_tokens(last)

    def refuse(self, batch: Mapping[str, Any], config: Any) -> None:
        """Refuse what a residual stream cut by tokens has not: embeddings from outside, hidden states to show.

        Raises:
            LongspanError: with the way out.
        """
        asked = batch.get("output_hidden_states")
        hidden = getattr(config, "output_hidden_states", False) if asked is None else asked
        for what, given in (
            ("output_hidden_states=True", hidden),
            ("inputs_embeds", batch.get("inputs_embeds") is not None),
        ):
            if given:
                raise LongspanError(
                    f"{what}: with tensor_style='megatron-sp' each rank has a part of the tokens' hidden states; use "
                    "tensor_style='tp', or leave it out"
                )

    def my_rows(self, real: Tensor) -> Tensor:
        """Of flags of all tokens `[B, L]` those of the tokens that this rank routes."""
        short = self.group.size * self.group.tokens(real.shape[1]) - real.shape[1]
        return F.pad(real, (0, short)).chunk(self.group.size, 1)[self.group.rank]


def check_style(style: Any, size: int) -> None:
    """Refuse a style that is none.

    Raises:
        LongspanError: with those there are.
    """
    if style not in STYLES:
        raise LongspanError(f"tensor_style={spell(style)} is unknown; choose {' or '.join(map(repr, STYLES))}")


def _with_hidden(args: tuple[Any, ...], kwargs: dict[str, Any], change: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
    return args, {**kwargs, name: change(kwargs[name])}


def _with_first(output: Any, change: Any) -> Any:
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)
