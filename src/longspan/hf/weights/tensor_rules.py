"""Plan tensor parallelism: how each weight of a Hugging Face model is sharded over the `tensor` axis.

`longspan.hf.weights.attention_rules` plans attention. The first matmuls of an MLP are sharded by columns, the last by
rows, embedding and head by the vocabulary, experts one by one.
"""

from __future__ import annotations

from typing import Literal, NoReturn

from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.comm.tensor import Parts, Rule
from longspan.compat.reading import EXPERTS
from longspan.compat.transformers_api import reads_weight
from longspan.core.errors import LongspanError
from longspan.core.heads import split_groups
from longspan.core.tile_sizes import even_span
from longspan.hf.weights.attention_rules import FUSED, AttentionRules, concatenated

TensorStyle = Literal["tp", "megatron-sp"]
STYLES = ("tp", "megatron-sp")


class TensorRules(AttentionRules):
    """How `TensorParallel` changes a model, on one rank of a tensor group; nothing is changed yet.

    `others`: ranks of the sequence group, for the mesh that an error suggests.
    """

    def __init__(self, model: PreTrainedModel, size: int, rank: int, style: TensorStyle, others: int = 1) -> None:
        self.rank, self.style, self.others = rank, style, others
        self.experts = list[str]()  # modules of which each rank holds some experts
        # PEFT's outermost modules around single weights (of a router), whose forwards read the weights.
        wrapped = (path for path, module in model.named_modules() if hasattr(module, "parameter_name"))
        self.adapted = [path for path in wrapped if not path.endswith(".base_layer")]
        super().__init__(model, size, f"tensor={size}", f"tensor=1, ulysses={size * others}")

    def _plan(self) -> None:
        for path, style in self.styles.items():
            if style == EXPERTS:
                self._experts(path)
        inside = tuple(f"{path}." for path, kind in self.regions.items() if kind == "moe")
        for path, style in self.styles.items():
            if style in ("colwise", "rowwise") and not path.startswith(inside):
                self.linear(path, style)
        self.check_regions()
        self._vocabulary()
        self._check_reads(inside)
        self._rest(inside)
        self.check_draws(self.model)

    def _planned(self, path: str) -> bool:
        return True

    def _of_features(self, path: str, width: int) -> Parts:
        """Return each rank's features between the matmuls of an MLP."""
        spans = [even_span(width, rank, self.size) for rank in range(self.size)]
        if not all(start < stop for start, stop in spans):
            self.refuse_size(f"features between the matmuls of {path}", width)
        return Parts(width, tuple((span,) for span in spans))

    def _outputs(self, path: str, width: int) -> Parts:
        owner, _, own = path.rpartition(".")
        if owner in self.attention:
            return super()._outputs(path, width)
        if own in FUSED.get(self.model_type, ()):
            return concatenated([self._of_features(path, width // 2)] * 2)
        return self._of_features(path, width)

    def _inputs(self, path: str, width: int) -> Parts:
        attends = path.rpartition(".")[0] in self.attention
        return super()._inputs(path, width) if attends else self._of_features(path, width)

    def _check_linear(self, path: str, base: nn.Module) -> None:
        weight = getattr(base, "weight", None)
        if not isinstance(base, nn.Linear) or not isinstance(weight, Tensor) or not weight.is_floating_point():
            self.refuse(f"layer {path} is not a linear layer with floating-point weights ({type(base).__name__})")

    def _shard(self, parts: Parts, dim: int, path: str) -> Rule:
        if parts.even:
            return Rule(dim)
        if self.kv_heads < self.size and self.is_of_kv(path):
            return Rule(partial=True, parts=parts)  # small, and needed by several ranks: replicate it
        return Rule(dim, parts=parts)

    def _experts(self, path: str) -> None:
        module, owner = self.modules[path], path.rpartition(".")[0]
        if hasattr(module, "base_layer"):
            self.refuse(f"layer {path} has LoRA on experts, which are sharded with it by `experts` only")
        count = getattr(module, "num_experts", None)
        weights = dict(module.named_parameters(recurse=False))
        inner = [name for name, _ in module.named_parameters() if name not in weights]
        if not isinstance(count, int) or inner or any(len(p) != count for p in weights.values()):
            self.refuse(f"layer {path} ({type(module).__name__}) does not stack its experts in one tensor per weight")
        if not all(start < stop for start, stop in (even_span(count, r, self.size) for r in range(self.size))):
            self.refuse_size(f"experts in {path}", count)
        self.add_rule(module, path, **dict.fromkeys(weights, Rule(0)))
        self.regions[owner] = "moe"
        self.experts.append(path)

    def _vocabulary(self) -> None:
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        if self.model.loss_type != "ForCausalLM" or not isinstance(head, nn.Linear):
            self.refuse("only a causal LM with a linear head can be sharded by its vocabulary")
        if not isinstance(embedding, nn.Embedding):
            self.refuse(f"its embedding is a {type(embedding).__name__}")
        for module in (embedding, head):
            entries = len(module.weight)
            if even_span(entries, self.size - 1, self.size)[0] == entries:
                self.refuse_size(f"entries of the vocabulary in {self.names[module]}", entries)
            if next(module.children(), None) is not None:
                self.refuse(f"{self.names[module]} has adapters")
            self.add_rule(module, self.names[module], weight=Rule(0), bias=Rule(0))

    def _check_reads(self, moe: tuple[str, ...]) -> None:
        """Raise for weights that their module's owner reads, and for a second embedding of all tokens."""
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        for path, module in self.modules.items():
            for name, child in module.named_children():
                if child not in (embedding, head) and not path.startswith(moe) and reads_weight(module, name):
                    self.refuse(f"{type(module).__name__} {path} reads the weight of `{name}` without calling it")
            if self.style == "megatron-sp" and isinstance(module, nn.Embedding) and module is not embedding:
                self.refuse(f"{path} embeds all tokens, but each rank has only its own with tensor_style='megatron-sp'")

    def _rest(self, moe: tuple[str, ...]) -> None:
        """Add the weights that no style names: replicated, except some of attention."""
        decoder = f"{self.names[self.decoder]}."
        tied = {id(self.model.get_parameter(name)) for name in self.of_parameters}
        for name, p in self.model.named_parameters():
            if name in self.of_parameters or id(p) in tied:
                continue
            region = next((x for x in self.regions if name.startswith(f"{x}.")), None)
            if region is None or name.startswith(moe):
                of_tokens = self.style == "megatron-sp" and name.startswith(decoder)
                self.of_parameters[name] = Rule(partial=of_tokens or region is not None)
            else:
                self.rest_of_region(name, p, region)

    def refuse_size(self, what: str, count: int, even: bool = True) -> NoReturn:
        total = self.size * self.others
        fits = max(t for t in range(1, self.size) if total % t == 0 and self._fits(t, count if even else t))
        raise LongspanError(
            f"`tensor={self.size}` would leave a rank without any of the {count} {what} of {self.name}; try "
            f"`tensor={fits}, ulysses={total // fits}`"
        )

    def _fits(self, t: int, count: int) -> bool:
        heads = split_groups(self.q_heads, self.kv_heads, t)
        return all(shard.q_heads for shard in heads) and even_span(count, t - 1, t)[0] < count
