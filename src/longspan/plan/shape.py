"""The shape of a causal language model: its layers and every weight. Sizes are in elements."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from longspan.core.errors import LongspanError
from longspan.core.reading import OneFlag
from longspan.core.rope import ModelPositions
from longspan.core.validation import LARGEST_COUNT, check_number
from longspan.plan.layers import Mlp, Parameter, TokenMixing
from longspan.plan.tower import Tower


@dataclass(frozen=True)
class Tuning(OneFlag):
    """Which weights are trained."""

    lora: int | None = None  # the rank of LoRA; None: all weights but those of `freeze` are trained
    targets: tuple[str, ...] = ()  # the ends of the names of modules that get LoRA; by default all linear layers
    freeze: tuple[str, ...] = ()  # patterns of names
    dora: bool = False  # whether a magnitude for each output is trained, too
    quantize: bool = False  # whether frozen linear layers are stored in 4 bits

    def check(self, mode: str) -> None:
        """Raise for options that contradict each other, or the mode of a job."""
        if self == ALL_TRAINED:
            return
        if mode != "train":
            raise LongspanError(f"--tuning {self}: --mode {mode} trains no weight; leave it out")
        if self.lora is None and (self.targets or self.dora or self.quantize):
            raise LongspanError(f"--tuning {self} needs LoRA; give its rank, such as lora=16")
        if self.lora is not None and (self.freeze or (self.dora and self.quantize)):
            raise LongspanError(f"--tuning {self}: longspan train does not take these together; leave one of them out")
        if self.lora is not None:
            check_number("--tuning: lora", self.lora, 1, LARGEST_COUNT)


ALL_TRAINED = Tuning()


@dataclass(frozen=True, eq=False)
class LayerShape:
    """One decoder layer. Equal layers of a model are one object, so that each kind is costed once.

    Attributes:
        mixing: attention or a recurrence.
        mlp: dense or experts.
        parameters: every weight, named relative to the layer, in the module's order.
        has_backward: whether training runs its backward: it or something before it is trained.
    """

    mixing: TokenMixing
    mlp: Mlp
    parameters: tuple[Parameter, ...] = ()
    has_backward: bool = True

    @cached_property
    def params(self) -> int:
        return sum(p.numel for p in self.parameters)

    @cached_property
    def adapts_experts(self) -> bool:
        """Whether LoRA is on stacked experts."""
        return any(".experts." in p.name and ".lora_" in p.name for p in self.parameters)

    @property
    def fewest_experts(self) -> int:
        """Experts that a rank needs at least: PEFT mistakes the LoRA of a single one for that of a plain matrix."""
        return 2 if self.adapts_experts else 1

    @cached_property
    def active_params(self) -> int:
        """Elements of the weights that one token uses, of routed experts those chosen for it."""
        return sum(self.mlp.active(p) for p in self.parameters)

    @cached_property
    def matmul_params_active(self) -> int:
        """Elements of the matrices and convolutions that one token uses: 2 FLOPs each per token in a forward."""
        return sum(self.mlp.active(p) for p in self.parameters if len(p.shape) > 1 and not p.name.endswith("bias"))

    @cached_property
    def trained_share(self) -> float:
        """Share of `matmul_params_active` that is trained: a backward computes its gradients, too."""
        mine = [p for p in self.parameters if len(p.shape) > 1 and p.trained and not p.name.endswith("bias")]
        return sum(map(self.mlp.active, mine)) / max(1, self.matmul_params_active)


@dataclass(frozen=True, eq=False)
class ModelShape:
    """A causal language model.

    Attributes:
        name: as asked for.
        d_model: hidden size.
        vocab: rows of the embedding.
        tied: whether the head is the embedding.
        max_position: `max_position_embeddings`; None if the config does not say.
        layers: in order; repeated layers are the same object.
        root: weights outside the layers: embeddings, learnt positions, final norm, and the head unless tied.
        positions: what the config says about positions.
        refused: reasons why this version does not train it.
        tower: the vision tower; None for a language model.
        tuning: the flags that say which weights are trained; each weight says whether it is.
        teacher: a frozen model, whose forward each micro-batch runs first: a teacher, or DPO's reference.
    """

    name: str
    d_model: int
    vocab: int
    tied: bool
    max_position: int | None
    layers: tuple[LayerShape, ...]
    root: tuple[Parameter, ...]
    positions: ModelPositions = field(default_factory=ModelPositions)
    refused: tuple[str, ...] = ()
    tower: Tower | None = None
    tuning: Tuning = ALL_TRAINED
    teacher: ModelShape | None = None

    def taught_by(self, teacher: ModelShape) -> ModelShape:
        """Return the model with a teacher; raise if the two predict different vocabularies."""
        if teacher.vocab != self.vocab:
            raise LongspanError(
                f"the teacher {teacher.name} has a vocabulary of {teacher.vocab:,} tokens and {self.name} one of "
                f"{self.vocab:,}, so their predictions cannot be compared; give a teacher with the model's tokenizer"
            )
        return replace(self, teacher=teacher)

    @property
    def head(self) -> Parameter:
        """The LM head's weight, which may be the embedding's."""
        return self.root[0] if self.tied else self.root[-1]

    def longer(self, context: int) -> dict[str, Any] | None:
        """Return the values of the config that a context beyond the model's positions needs; None if it is within.

        Raises:
            LongspanError: if no scaling reaches the context.
        """
        self.positions.check(context, self.name, extends=True)
        reach = self.positions.reach
        return None if reach is None or context <= reach else self.positions.extended(context)

    @property
    def furthest(self) -> int | None:
        """The longest context, with a scaling of its positions if it has one; None: no limit."""
        reach = self.positions.reach
        return reach if reach is None or self.positions.extended(reach + 1) is None else None

    @cached_property
    def packed(self) -> bool:
        """Whether any weight is stored in 4 bits."""
        return any(p.packed for layer, _ in self.layer_kinds for p in layer.parameters)

    @cached_property
    def root_params(self) -> int:
        """Elements of the weights outside the layers, without those of a vision tower."""
        return sum(p.numel for p in self.root)

    @property
    def tower_params(self) -> int:
        return 0 if self.tower is None else self.tower.params

    @cached_property
    def params(self) -> int:
        return self.tower_params + self.root_params + sum(layer.params * count for layer, count in self.layer_kinds)

    @cached_property
    def active_params(self) -> int:
        """Elements of the weights that one token uses, embedding and head included."""
        layers = sum(layer.active_params * count for layer, count in self.layer_kinds)
        return self.tower_params + self.root_params + layers

    @cached_property
    def layer_kinds(self) -> list[tuple[LayerShape, int]]:
        """Distinct layers in order of first appearance, each with its count."""
        counts: dict[LayerShape, int] = {}
        for layer in self.layers:
            counts[layer] = counts.get(layer, 0) + 1
        return list(counts.items())

    @cached_property
    def groups(self) -> list[tuple[tuple[Parameter, ...], int]]:
        """Weights outside the layers and of each kind of layer, with their counts; without a vision tower's."""
        return [(self.root, 1), *((layer.parameters, count) for layer, count in self.layer_kinds)]

    @cached_property
    def q_heads(self) -> int:
        """Most query heads of a softmax layer; of any layer if none is softmax."""
        return max(mixing.q_heads for mixing in self._with_heads)

    @cached_property
    def kv_heads(self) -> int:
        """Most KV heads of the same layers."""
        return max(mixing.kv_heads for mixing in self._with_heads)

    @property
    def _with_heads(self) -> list[TokenMixing]:
        distinct = [layer.mixing for layer, _ in self.layer_kinds]
        return [mixing for mixing in distinct if mixing.shards_heads] or distinct
