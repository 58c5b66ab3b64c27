"""Apply memory options to a Hugging Face model: checkpoint its layers, run its MLPs and norms tile by tile."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longspan.core.errors import LongspanError
from longspan.core.memory import FASTEST, Memory
from longspan.core.tile_sizes import layers_held, layers_per_checkpoint, mlp_rows, norm_rows
from longspan.core.validation import checked_call
from longspan.hf.forward.registry import LayerBinding
from longspan.hf.memory_auto import hardware_of, memory_options_for
from longspan.hf.shapes import shape_of_model
from longspan.hf.state import state_of
from longspan.hf.support import attention_layers, decoder_layers, draws
from longspan.memory.activations import RecomputedActivations
from longspan.memory.checkpointing import COMPILED, CheckpointedLayer, LayerCall, LayerGroups, forward_of
from longspan.memory.normed_linear import NormedLinear
from longspan.memory.offload import store_for
from longspan.memory.tiles import Tiled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.fsdp import MixedPrecisionPolicy
    from transformers import PreTrainedModel

    from longspan.comm.mesh import SequenceSharding
    from longspan.memory.offload import Store
    from longspan.plan.hardware import Hardware
    from longspan.plan.job import TensorStyle


class MemoryManager:
    """Apply memory options to a model, and change them between steps.

    Args:
        modules: of the transformers model, its attention layers bound, before FSDP.
        config: of the model.
        memory: the memory options.
        store: where saved activations are offloaded; None: they stay on the device.
        auto: chooses options for each batch larger than all before; None: they stay.

    Raises:
        LongspanError: for an option that the model does not support, naming the layer.
    """

    def __init__(
        self,
        modules: MemoryModules,
        config: Any,
        memory: Memory,
        store: Store | None = None,
        auto: Auto | None = None,
    ) -> None:
        self.auto = auto
        self.why = "as parallelize was asked"
        self.found = modules
        self.layers = self.found.layers
        self.bindings = [binding for layer in self.layers for binding in _bindings(layer)]
        self.groups = LayerGroups(last=self.layers[-1])
        self.hidden = config.get_text_config().hidden_size
        self.mlps, self.norms, self.checkpointed = list[Tiled](), list[Tiled](), list[CheckpointedLayer]()
        self.activations, self.linears = list[RecomputedActivations](), list[NormedLinear]()
        self.set(memory, store)

    def set(self, memory: Memory, store: Store | None, why: str | None = None) -> None:
        """Change the memory options, between two steps.

        Args:
            memory: the memory options; `cpu_offload` is FSDP's, and stays.
            store: where saved activations are offloaded; None: they stay on the device.
            why: the reason, for `longspan.explain`.

        Raises:
            LongspanError: for an option that the model does not support, naming the layer.
        """
        self.found.check(memory)
        self.memory, self.store, self.why = memory, store, why or self.why
        self._install(memory)
        for mlp in self.mlps:
            mlp.on = memory.tiled_mlp != 1
        for norm in self.norms:
            norm.on = memory.tiled_norms
        for linear in self.linears:
            linear.on = memory.tiled_norms
        for act in self.activations:
            act.on = memory.recompute_mlp_act and memory.tiled_mlp == 1
        self.groups.per_checkpoint = layers_per_checkpoint(len(self.layers), memory.layers_per_checkpoint)
        for layer in self.checkpointed:
            layer.memory, layer.store = memory, store
        for binding in self.bindings:
            binding.memory = memory

    def _install(self, memory: Memory) -> None:
        """Replace the forwards that a memory option needs, the first time that it is on."""
        if memory.recompute_mlp_act and not self.activations:
            self.activations = [RecomputedActivations(mlp) for mlp in self.found.mlps]
        if memory.tiled_mlp != 1 and not self.mlps:
            self.mlps = [self._tiled(mlp) for mlp in self.found.mlps]
        if memory.tiled_norms and not self.norms:
            self.norms = [Tiled(norm, self.found.names[norm], norm_rows, cheap=True) for norm in self.found.norms]
            self.linears = [NormedLinear(m) for layer in self.layers for m in layer.modules() if type(m) is nn.Linear]
        if memory.checkpointing != "none" and not self.checkpointed:
            self.checkpointed = [self._checkpointed(layer) for layer in self.layers]

    def _tiled(self, mlp: nn.Module) -> Tiled:
        widths = [max(p.shape[-2:]) for p in mlp.parameters() if p.dim() > 1]
        rows = functools.partial(self._mlp_rows, self.hidden, max(widths))
        return Tiled(mlp, self.found.names[mlp], rows, draws=any(draws(module) for module in mlp.modules()))

    def _mlp_rows(self, hidden: int, width: int, tokens: int, on_cpu: bool) -> int:
        return mlp_rows(tokens, hidden, width, self.memory.tiled_mlp, on_cpu)

    def check(self) -> None:
        """Raise if transformers' gradient checkpointing and longspan's are both on."""
        if self._checkpoints_by_itself and self.memory.checkpointing != "none":
            raise LongspanError(
                f"gradient_checkpointing_enable() was called on a model that has memory.checkpointing="
                f"{self.memory.checkpointing!r}: each layer would be checkpointed twice; call "
                f"gradient_checkpointing_disable(), or parallelize with checkpointing='none'"
            )

    @property
    def _checkpoints_by_itself(self) -> bool:
        """Whether transformers' own gradient checkpointing is on."""
        return any(getattr(layer, "gradient_checkpointing", False) for layer in self.layers)

    def keep_routing(self, wanted: bool) -> None:
        """Set whether tiles save their routers' logits, for the router loss of the next forward.

        Raises:
            LongspanError: on every rank, if no router is found in them.
        """
        if wanted and self.memory.tiled_mlp != 1 and not any(mlp.routers for mlp in self.mlps):
            raise LongspanError(
                "output_router_logits=True needs the routers' logits of all tokens, and no router was found in the "
                f"experts that tiled_mlp={self.memory.tiled_mlp} runs tile by tile; use tiled_mlp=1, or "
                "output_router_logits=False"
            )
        for mlp in self.mlps:
            mlp.saves_router_logits = wanted

    def choose(self, length: int, rows: int) -> bool:
        """With `memory="auto"`, choose memory options if the batch is larger than all before. Collective.

        Return whether they changed, so that the store must reserve room again. Options that conflict with
        transformers' own gradient checkpointing are left out.

        Args:
            length: tokens of a sequence.
            rows: sequences of this replica.

        Raises:
            LongspanError: on every rank, if nothing fits.
        """
        if self.auto is None or length * rows <= self.auto.largest:
            return False
        fixed: dict[str, Any] = {"cpu_offload": False}
        if self.found.untiled is not None:
            fixed["tiled_mlp"] = 1
        if self._checkpoints_by_itself:
            fixed["checkpointing"] = "none"
        memory, why = self.auto.memory_options(length, rows, fixed)
        self.auto.largest = length * rows
        self.set(memory, store_for(memory, self.auto.device), why)
        return True

    def reserve(self, model: PreTrainedModel, tokens: Tensor) -> None:
        """Reserve room in the store for the activations that one forward saves.

        Args:
            model: the model.
            tokens: ids, or embeddings, of my tokens: `[B, L, ...]`.

        Raises:
            LongspanError: if there is none, with the bytes.
        """
        if self.store is None or not torch.is_grad_enabled():
            return
        config = model.config.get_text_config()
        element = next(model.parameters()).dtype.itemsize
        heads = config.num_attention_heads
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        attention = 0
        if self.memory.checkpointing == "selective":
            attention = width * element + 4 * heads
        if self.memory.checkpointing == "save_attention":  # q, k and v of at most as many heads, output twice
            attention = 5 * width * element + 4 * heads
        inputs, _ = layers_held(len(self.layers), self.groups.per_checkpoint)
        per_token = config.hidden_size * element * inputs + attention * len(self.layers)
        self.store.reserve(per_token * tokens.shape[:2].numel())

    def compile(self, options: dict[str, Any]) -> None:
        """Compile each layer inside its checkpoint; modules that run tile by tile stay uncompiled."""
        made: dict[Any, Any] = {}
        for layer in self.layers:
            forward = type(layer).forward
            if forward not in made:
                made[forward] = torch.compile(forward, **options)
            setattr(layer, COMPILED, made[forward])
            if not isinstance(layer.forward, CheckpointedLayer):
                layer.forward = lambda *args, layer=layer, **kwargs: forward_of(layer)(layer, *args, **kwargs)

    def _checkpointed(self, layer: nn.Module) -> CheckpointedLayer:
        bound = _bindings(layer)

        def bind(call: LayerCall | None) -> None:
            for binding in bound:
                binding.keeper = call

        drawing = any(draws(module) for module in layer.modules())
        return CheckpointedLayer(layer, FASTEST, None, bind, draws=drawing, groups=self.groups)


@checked_call()
def compile_layers(model: nn.Module, **options: Any) -> None:
    """Compile the decoder layers of a parallelized model with `torch.compile`, for training.

    Each layer is compiled by itself, inside its activation checkpoint. Graphs break at attention, at collectives and at
    modules that run tile by tile: these run uncompiled, so every memory option stays, and no logits are made.
    Without gradients, in `model.eval()` and in generation, layers are not compiled.

        model = longspan.parallelize(model, sp, memory="longest")
        longspan.compile_layers(model, dynamic=True)

    Args:
        model: as `longspan.parallelize` returned it.
        options: of `torch.compile`; not `fullgraph=True`, as there are several graphs.

    Raises:
        LongspanError: for a model that is not parallelized, or `fullgraph=True`.
    """
    state = state_of(model)
    if options.get("fullgraph"):
        raise LongspanError("fullgraph=True: a layer is several graphs, with attention between them; leave it out")
    state.memory.compile(options)


class Auto:
    """Choose memory options by the planner, for `memory="auto"`.

    Args:
        model: the transformers model.
        sp: its sharding.
        fsdp: whether weights are sharded.
        mp_policy: FSDP's mixed precision, for the compute dtype.
        style: of the tensor axis.

    Raises:
        LongspanError: for a model that the planner cannot read.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sp: SequenceSharding,
        fsdp: bool,
        mp_policy: MixedPrecisionPolicy | None,
        style: TensorStyle = "tp",
    ) -> None:
        self.style = style
        self.sp, self.fsdp, self.largest, self.device = sp, fsdp, 0, sp.device
        self.shape = shape_of_model(model)
        asked = mp_policy.param_dtype if mp_policy is not None else None
        self.dtype = asked or next(model.parameters()).dtype
        self.hardware: Hardware | None = None

    def memory_options(self, length: int, rows: int, fixed: dict[str, Any]) -> tuple[Memory, str]:
        """Return the fastest options that fit the smallest device of all ranks, and the reason. Collective."""
        if self.hardware is None:
            least = torch.tensor(hardware_of(self.device).memory_bytes, dtype=torch.float64, device=self.device)
            if self.sp.job_size > 1:
                dist.all_reduce(least, op=dist.ReduceOp.MIN)
            self.hardware = hardware_of(self.device, float(least))
        batch = rows * self.sp.data_size
        options: dict[str, Any] = {"tokens": length, "batch": batch, "dtype": self.dtype, "fsdp": self.fsdp}
        options["style"] = self.style
        return memory_options_for(self.shape, self.sp, self.hardware, fixed=fixed, **options)


def _bindings(layer: nn.Module) -> list[LayerBinding]:
    found = (getattr(module, "longspan_layer", None) for module in layer.modules())
    return [binding for binding in found if isinstance(binding, LayerBinding)]


class MemoryModules:
    """The modules that memory options concern.

    Attributes:
        layers: the decoder layers.
        mlps: parts of a layer with matrices and without attention.
        norms: of the layers.
        names: of all modules.
        untiled: why some MLP cannot run tile by tile; None if all can.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.layers = decoder_layers(model)
        self.names = {module: name for name, module in model.named_modules()}
        self.untiled: str | None = None
        self.mlps = [mlp for layer in self.layers for mlp in self._mlps(layer)]
        self.norms = [*self._norms()]

    def check(self, memory: Memory) -> None:
        """Raise for memory options that the model does not support.

        Raises:
            LongspanError: naming the layer.
        """
        if memory.tiled_mlp != 1 and self.untiled is not None:
            raise LongspanError(f"{self.untiled}; use tiled_mlp=1")

    def _mlps(self, layer: nn.Module) -> Iterator[nn.Module]:
        attends = set(attention_layers(layer).values())
        found = [
            child
            for child in layer.children()
            if not any(module in attends for module in child.modules()) and any(p.dim() > 1 for p in child.parameters())
        ]
        if not found:
            self.untiled = (
                self.untiled
                or f"{self.names[layer]} ({type(layer).__name__}) has no MLP of its own to run tile by tile"
            )
        for child in found:
            if _takes_one(child):
                yield child
            else:
                self.untiled = self.untiled or (
                    f"{self.names[child]} ({type(child).__name__}) is called with more than hidden states, so it "
                    f"cannot run tile by tile"
                )

    def _norms(self) -> Iterator[nn.Module]:
        for module in (module for layer in self.layers for module in layer.modules()):
            leaf = [*module.parameters()] and not [*module.children()]
            if "Norm" in type(module).__name__ and leaf and _takes_one(module):
                yield module


def _takes_one(module: nn.Module) -> bool:
    """Whether a module can be called with one tensor alone, and needs no more."""
    parameters = inspect.signature(module.forward).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return len(needed) == 1
