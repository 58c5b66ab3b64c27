"""A model of which some weights are trained: frozen ones, LoRA's matrices, and frozen weights in 4 bits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from longspan.core.errors import LongspanError
from longspan.core.validation import LARGEST_COUNT, check_number
from longspan.plan.layers import Parameter
from longspan.plan.models.shape import LayerShape, ModelShape


@dataclass(frozen=True)
class Tuning:
    """Which weights are trained, by the flags of `longspan train`."""

    lora: int | None = None  # the rank of LoRA; None: all weights but those of `freeze` are trained
    targets: tuple[str, ...] = ()  # the ends of the names of modules that get LoRA; by default all linear layers
    freeze: tuple[str, ...] = ()  # patterns of names
    dora: bool = False  # whether a magnitude for each output is trained, too
    quantize: bool = False  # whether frozen linear layers are stored in 4 bits
    # ends of the names of weights that get LoRA as parameters (experts, routers), each with its rank; None: those that
    # PEFT adapts as linear layers of the model's files (`STORED_ONE_BY_ONE`)
    parameters: tuple[tuple[str, int], ...] | None = None

    def check(self, mode: str) -> None:
        """Raise for options that contradict each other, or the mode of a job."""
        if self == Tuning():
            return
        asked = " ".join(self.flags)
        if mode != "train":
            raise LongspanError(f"{asked}: --mode {mode} trains no weight; leave it out")
        if self.lora is None and (self.targets or self.dora or self.quantize):
            raise LongspanError(f"{asked} needs LoRA; give its rank, such as --lora 16")
        if self.lora is not None and (self.freeze or (self.dora and self.quantize)):
            raise LongspanError(f"{asked}: longspan train does not take these together; leave one of them out")
        if self.lora is not None:
            check_number("--lora", self.lora, 1, LARGEST_COUNT)

    def fixed(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return fixed memory options, and those that 4-bit weights exclude."""
        return {"cpu_offload": False, **options} if self.quantize else options

    @property
    def flags(self) -> list[str]:
        """The flags of `longspan train`."""
        flags = [] if self.lora is None else [f"--lora {self.lora}"]
        for flag, names in (("--lora-targets", self.targets), ("--freeze", self.freeze)):
            flags += [f"{flag} {' '.join(repr(name) if '*' in name else name for name in names)}"] * bool(names)
        return flags + ["--dora"] * self.dora + ["--quantize nf4"] * self.quantize


STORED_ONE_BY_ONE = frozenset((
    "afmoe", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe",
    "exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa", "hunyuan_v1_moe",
    "longcat_flash", "mellum", "minimax", "minimax_m2", "mixtral", "olmoe", "qwen3_moe", "qwen3_next", "solar_open",
))  # fmt: skip
"""Model types whose files store matrices of each expert and of the router as linear layers: PEFT adapts these, too."""

_OF_EXPERTS = {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "gate"}
"""Names of these layers. PEFT then adapts no other layer of such a name, of a dense or shared MLP."""


def _with_parameters(tuning: Tuning, model_type: str) -> Tuning:
    """Return a tuning of which `parameters` is known."""
    if tuning.parameters is not None or tuning.lora is None or model_type not in STORED_ONE_BY_ONE:
        return tuning
    asked, rank = set(tuning.targets) or _OF_EXPERTS, tuning.lora
    ranks = {
        "experts.gate_up_proj": 2 * rank * bool(asked & {"gate_proj", "w1"}),  # two matrices, of this rank each
        "experts.down_proj": rank * bool(asked & {"down_proj", "w2"}),
        "gate.weight": rank * ("gate" in asked),
    }
    return replace(tuning, parameters=tuple((end, rank) for end, rank in ranks.items() if rank))


def tuned_shape(model: ModelShape, tuning: Tuning) -> ModelShape:
    """Return a model with the weights that a run adds, and which ones it trains."""
    if tuning == Tuning():
        return model
    given, tuning = tuning, _with_parameters(tuning, model.model_type)
    elsewhere = frozenset() if tuning is given else _OF_EXPERTS
    frozen = tuning.lora is not None
    root = tuple(replace(p, trained=not frozen and not _matches(p.name, tuning.freeze)) for p in model.root)
    in_front = root[: -1 if model.tied else -2]  # behind the layers are the final norm, and an untied head
    made: dict[tuple[LayerShape, tuple[Parameter, ...], bool], LayerShape] = {}
    layers, backward = [], model.tower is not None or any(p.trained for p in in_front)
    for number, layer in enumerate(model.layers):
        parameters = tuple(_tuned(layer.parameters, tuning, elsewhere, f"model.layers.{number}."))
        backward = backward or any(p.trained for p in parameters)
        made_layer = replace(layer, parameters=parameters, has_backward=backward)
        layers.append(made.setdefault((layer, parameters, backward), made_layer))
    return replace(model, layers=tuple(layers), root=root, tuning=tuning)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _tuned(parameters: tuple[Parameter, ...], tuning: Tuning, elsewhere: Set[str], path: str) -> Iterator[Parameter]:
    for p in parameters:
        module = p.name.removesuffix(".weight")
        linear = len(p.shape) == 2 and module != p.name and module not in ("mlp.gate", "mlp.router")
        if tuning.lora is None:
            yield replace(p, trained=not _matches(path + p.name, tuning.freeze))
            continue
        yield replace(p, trained=False, packed=tuning.quantize and linear)
        ranks = [rank for end, rank in tuning.parameters or () if p.name.endswith(f".{end}")]
        if linear and not ranks and module.rpartition(".")[2] not in elsewhere:
            targeted = not tuning.targets or any(f".{module}".endswith(f".{end}") for end in tuning.targets)
            ranks = [tuning.lora] * targeted
        for rank in ranks:
            rows = rank * math.prod(p.shape[:-2])  # of all experts
            yield Parameter(f"{module}.lora_A.weight", (rows, p.shape[-1]))
            yield Parameter(f"{module}.lora_B.weight", (p.shape[-2], rows))
            if tuning.dora:
                yield Parameter(f"{module}.lora_magnitude_vector.weight", p.shape[:1])
