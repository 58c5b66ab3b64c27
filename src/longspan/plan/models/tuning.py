"""A model of which some weights are trained: frozen ones, LoRA's matrices, and frozen weights in 4 bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from longspan.core.errors import LongspanError
from longspan.core.validation import LARGEST_COUNT, check_number
from longspan.plan.layers import Parameter
from longspan.plan.models.shape import LayerShape, ModelShape


@dataclass(frozen=True)
class Tuning:
    """Which weights are trained, by the flags of `longspan train`.

    Attributes:
        lora: the rank of LoRA; None: all weights but those of `freeze` are trained.
        targets: the ends of the names of modules that get LoRA; by default all linear layers.
        freeze: patterns of names.
        dora: whether a magnitude for each output is trained, too.
        quantize: whether frozen linear layers are stored in 4 bits.
    """

    lora: int | None = None
    targets: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    dora: bool = False
    quantize: bool = False

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


def tuned_shape(model: ModelShape, tuning: Tuning) -> ModelShape:
    """Return a model with the weights that a run adds, and which ones it trains."""
    if tuning == Tuning():
        return model
    frozen = tuning.lora is not None
    root = tuple(replace(p, trained=not frozen and not _matches(p.name, tuning.freeze)) for p in model.root)
    in_front = root[: -1 if model.tied else -2]  # behind the layers are the final norm, and an untied head
    made: dict[tuple[LayerShape, tuple[Parameter, ...], bool], LayerShape] = {}
    layers, backward = [], model.tower is not None or any(p.trained for p in in_front)
    for number, layer in enumerate(model.layers):
        parameters = tuple(_tuned(layer.parameters, tuning, f"model.layers.{number}."))
        backward = backward or any(p.trained for p in parameters)
        made_layer = replace(layer, parameters=parameters, has_backward=backward)
        layers.append(made.setdefault((layer, parameters, backward), made_layer))
    return replace(model, layers=tuple(layers), root=root, tuning=tuning)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _tuned(parameters: tuple[Parameter, ...], tuning: Tuning, path: str) -> Iterator[Parameter]:
    for p in parameters:
        module = p.name.removesuffix(".weight")
        linear = len(p.shape) == 2 and module != p.name and module not in ("mlp.gate", "mlp.router")
        if tuning.lora is None:
            yield replace(p, trained=not _matches(path + p.name, tuning.freeze))
            continue
        yield replace(p, trained=False, packed=tuning.quantize and linear)
        if linear and (not tuning.targets or any(f".{module}".endswith(f".{end}") for end in tuning.targets)):
            yield Parameter(f"{module}.lora_A.weight", (tuning.lora, p.shape[1]))
            yield Parameter(f"{module}.lora_B.weight", (p.shape[0], tuning.lora))
            if tuning.dora:
                yield Parameter(f"{module}.lora_magnitude_vector.weight", p.shape[:1])
