"""Memory options of a Hugging Face model: `memory="auto"` asks the planner for them, `MemoryManager` applies them.

Layers are checkpointed, and MLPs and norms run tile by tile.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import PreTrainedModel

from longspan.comm.agree import gather_numbers, on_every_rank
from longspan.comm.mesh import SequenceSharding
from longspan.compat.friends_api import float8_layers, float8_scales_span_tokens, has_fla
from longspan.compat.reading import attention_layers, decoder_layers, head_dim_of, mixer_layers
from longspan.compat.transformers_api import is_hybrid, set_checkpointing
from longspan.core.errors import LongspanError
from longspan.core.experts import Experts
from longspan.core.heads import slices_of
from longspan.core.memory import Memory
from longspan.core.parallel import TensorStyle
from longspan.core.tile_sizes import layers_held, layers_per_checkpoint, mlp_rows, most_mlp_tiles, norm_rows
from longspan.hf.cache.kv_cache import CachedInfo
from longspan.hf.forward.attention import LayerBinding
from longspan.hf.forward.stage import ForwardCall, Stage
from longspan.hf.model.examples import MODALITIES
from longspan.hf.model.support import draws, final_norm
from longspan.hf.model.vision import tower_blocks
from longspan.hf.weights.attention_slices import AttentionSlices
from longspan.hf.weights.experts import ExpertTiles
from longspan.memory.activations import NormedLinear, RecomputedActivations
from longspan.memory.checkpointing import CheckpointedLayer, LayerGroups
from longspan.memory.head_slices import HeadCut, SlicedAttention
from longspan.memory.offload import store_for
from longspan.memory.offload.store import Store
from longspan.memory.tiles import Tiled
from longspan.plan.cost.slices import slices_of_layers
from longspan.plan.from_model import shape_of_model
from longspan.plan.hardware import CATALOGUE, Hardware, read_hardware
from longspan.plan.job import CostContext, Job
from longspan.plan.memory_options import choose_memory, fixed_options
from longspan.plan.tower import PictureShape

PROCESS_BYTES = 1 << 30
"""Bytes of Python and its libraries on a CPU, or of a CUDA context on a GPU, which no plan counts."""


def device_memory(device: torch.device, ranks_here: int = 1) -> int:
    """Return the bytes of the GPU's memory, or on CPU of a rank's part of the machine's.

    `ranks_here`: ranks on this machine; torchrun's LOCAL_WORLD_SIZE wins.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE") or ranks_here)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // max(1, ranks_here)


def usable_memory(device: torch.device, taken: int = 0) -> float:
    """Return the bytes of memory that a rank can use.

    On a GPU: what is free, and what this process's allocator holds, less `taken`, the bytes of other tensors than the
    model's.
    """
    if device.type == "cpu":
        return hardware_of(device).memory_bytes
    free, _ = torch.cuda.mem_get_info(device)
    return max(1.0, free + torch.cuda.memory_reserved(device) - taken)


def bytes_of_other_tensors(model: nn.Module, device: torch.device) -> int:
    """Return the bytes of tensors on a GPU that are not the model's."""
    if device.type == "cpu":
        return 0
    own = sum(x.nbytes for x in (*model.parameters(), *model.buffers()) if x.device == device)
    return max(0, torch.cuda.memory_allocated(device) - own)


def hardware_of(device: torch.device, rank_bytes: float | None = None, ranks_here: int = 1) -> Hardware:
    """Return this device for the planner: from the catalogue by its name, else as an H100, with its own memory.

    `rank_bytes`: memory of a rank; by default the device's, without `PROCESS_BYTES`.
    """
    if rank_bytes is None:
        rank_bytes = max(device_memory(device, ranks_here) - PROCESS_BYTES, PROCESS_BYTES / 4)
    if device.type == "cpu":
        return dataclasses.replace(read_hardware("cpu"), memory_bytes=rank_bytes)
    named = torch.cuda.get_device_name(device).lower().replace(" ", "-")
    known = max((name for name in CATALOGUE if name.split("-")[0] in named), key=len, default="h100")
    return dataclasses.replace(read_hardware(known), memory_bytes=rank_bytes)


def hardware_of_ranks(rank_memory: float | None, ranks_here: int) -> Hardware:
    """Return this machine's device for the planner, before or after its ranks start; `rank_memory` is in GB."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return hardware_of(device, None if rank_memory is None else 1e9 * rank_memory, ranks_here)


class PlannedModel:
    """A model and how its ranks train it, for the planner."""

    def __init__(
        self,
        model: PreTrainedModel,
        sp: SequenceSharding,
        fsdp: bool,
        mp_policy: MixedPrecisionPolicy | None,
        style: TensorStyle,
        experts: Experts = 1,
    ) -> None:
        self.sp, self.shape = sp, shape_of_model(model)
        compute_dtype = (mp_policy and mp_policy.param_dtype) or next(model.parameters()).dtype
        self.job = Job(
            context=1,
            dtype="fp32" if compute_dtype == torch.float32 else "bf16",
            weight_sharding=fsdp and sp.fsdp_size > 1,
            parallel=dataclasses.replace(sp.parallel, tensor_style=style, experts=experts),
            fused=sp.device.type != "cuda" or has_fla(),
        )

    def slices(self, local_tokens: int, memory: Memory) -> tuple[int, ...]:
        """Return the number of slices of heads of each layer, for a batch with so many tokens on each rank."""
        job = dataclasses.replace(
            self.job,
            context=local_tokens * self.sp.size,
            batch=self.sp.data_size,
            memory=memory,
            documents=self.sp.ring_size > 1,  # with which a ring holds most blocks
        )
        return slices_of_layers(CostContext(self.shape, job))


class AutoMemory(PlannedModel):
    """Choose memory options by the planner, for the memory that is free at the first forward.

    Tensors besides the model that are on the GPU before `parallelize` count as `taken`. Later ones do not: they may be
    the optimizer's states, which the plan contains.

    `most_tokens`: tokens of the largest batch so far. `patches`: of images and of video, on the rank that encodes most.
    """

    def __init__(self, model: PreTrainedModel, sp: SequenceSharding, *args: Any) -> None:
        super().__init__(model, sp, *args)
        self.most_tokens, self.size, self.patches = 0, (1, 0), [0] * len(MODALITIES)
        self.replicas_differ = sp.data_size > 1
        self.taken = bytes_of_other_tensors(model, sp.device)
        self.hardware: Hardware | None = None

    def for_batch(
        self,
        length: int,
        rows: int,
        fixed: dict[str, Any],
        documents: bool,
        patches: Mapping[str, int] = MappingProxyType({}),
        width: int | None = None,
    ) -> tuple[Memory, str] | None:
        """Return the fastest options that fit the rank with least memory, and the reason; None if no replica's batch is
        larger than all before, in tokens or patches. Collective.

        This replica has `rows` sequences of `length` tokens, or of packed documents; `patches` are by modality those of
        the rank that encodes most; the options in `fixed` stay. Replicas need the same options: a recomputation gathers
        weights, which all ranks do together. `width` ranks share an elastic batch.
        """
        sp = self.sp
        if width is not None:  # as many tokens on each rank as a sequence of all ranks
            length *= sp.size // width
        encoded = [patches.get(kind, 0) for kind in MODALITIES]
        if sp.host_group is not None and (self.replicas_differ or width is not None):
            batches = gather_numbers([length, rows, documents, *encoded], sp.host_group)
            length, rows, *_ = max(batches, key=lambda batch: batch[0] * batch[1])
            documents = any(has_documents for _, _, has_documents, *_ in batches)
            encoded = [
                max(numbers) for numbers in zip(*(of_pictures for _, _, _, *of_pictures in batches), strict=True)
            ]
        most_patches = [max(pair) for pair in zip(encoded, self.patches, strict=True)]
        if length * rows <= self.most_tokens:
            if most_patches == self.patches:
                return None
            length, rows = self.size  # the options must still fit it
        if self.hardware is None:
            usable = usable_memory(sp.device, self.taken)
            if sp.world_size > 1:
                least = torch.tensor(usable, dtype=torch.float64, device=sp.device)
                dist.all_reduce(least, op=dist.ReduceOp.MIN)
                usable = float(least)
            self.hardware = hardware_of(sp.device, usable)
        job = dataclasses.replace(
            self.job,
            context=length,
            batch=rows * sp.data_size,
            documents=documents,
            pictures=self._pictures(most_patches),
            elastic=width is not None,
        )
        chosen = choose_memory(self.shape, job, self.hardware, fixed_options(self.shape, fixed))
        self.most_tokens, self.size, self.patches = length * rows, (length, rows), most_patches
        return chosen

    def _pictures(self, patches: list[int]) -> tuple[PictureShape, ...]:
        """Return pictures for the planner of which every rank encodes as many patches as the one with most."""
        if self.shape.tower is None:
            return ()
        merge = self.shape.tower.merge
        return tuple(
            PictureShape(kind, self.sp.size, merge, number // merge)
            for kind, number in zip(MODALITIES, patches, strict=True)
            if number
        )


class MemoryManager(Stage):
    """Apply memory options to a model, its attention layers bound, before FSDP, and change them before a forward.

    Saved activations are offloaded to `store`; None: they stay on the device. `planned` tells in how many slices of
    heads each layer runs; None: in as many as are asked for. If it is `AutoMemory`, it chooses options for each batch
    larger than all before.
    """

    def __init__(
        self,
        modules: MemoryModules,
        sp: SequenceSharding,
        memory: Memory,
        store: Store | None,
        planned: PlannedModel | None,
    ) -> None:
        self.planned, self.sp = planned, sp
        self.auto = planned if isinstance(planned, AutoMemory) else None
        self.modules, self.layers = modules, modules.layers
        self.bindings = [binding for layer in self.layers for binding in _bindings(layer)]
        self.groups = LayerGroups(last=self.layers[-1])  # of layers that share a checkpoint
        self.hidden = modules.model.config.get_text_config().hidden_size
        self.mlps, self.norms, self.checkpointed = list[Tiled](), list[Tiled](), list[CheckpointedLayer]()
        self.activations, self.linears = list[RecomputedActivations](), list[NormedLinear]()
        self.sliced = dict[str, SlicedAttention]()
        self.sliceable = self.auto is not None and bool(modules.head_cuts(0, sp))
        self.set(memory, store, "as parallelize was asked")

    def set(self, memory: Memory, store: Store | None, why: str) -> None:
        """Change the memory options, between two steps; `cpu_offload` is FSDP's, and stays."""
        self.modules.check(memory)
        self.options, self.store, self.why = memory, store, why
        self._install(memory)
        for tiled in (*self.mlps, *self.norms):
            tiled.on = memory.tiled
        for linear in self.linears:
            linear.on = memory.tiled
        for act in self.activations:
            act.on = not memory.tiled
        self._slice_heads(memory.head_slices)
        self._forget_readers()
        for block in self.modules.tower:
            set_checkpointing(block, on=memory.checkpointing != "none")
        self.groups.per_checkpoint = layers_per_checkpoint(len(self.layers), memory.checkpointing == "grouped")
        for layer in self.checkpointed:
            layer.memory, layer.store = memory, store
        for binding in self.bindings:
            binding.memory = memory

    def _install(self, memory: Memory) -> None:
        """Replace the forwards that a memory option needs, the first time that it is on."""
        modules = self.modules
        if not memory.tiled and not self.activations:
            self.activations = [RecomputedActivations(mlp) for mlp in modules.mlps]
        if memory.tiled and not self.norms:
            self.mlps = [self._tiled(mlp) for mlp in modules.mlps]
            self.norms = [Tiled(norm, modules.names[norm], norm_rows, cheap=True) for norm in modules.norms]
            self.linears = [NormedLinear(m) for layer in self.layers for m in layer.modules() if type(m) is nn.Linear]
        if memory.checkpointing != "none" and not self.checkpointed:
            self.checkpointed = [
                CheckpointedLayer(layer, _bindings(layer), self.groups, draws=any(map(draws, layer.modules())))
                for layer in self.layers
            ]

    def _slice_heads(self, asked: int) -> None:
        """Let attention layers run in `asked` slices of their heads; 0: as many as `slices_of` returns."""
        cuts = dict[str, HeadCut]()
        self.most_tokens = 0  # of the batches that `_fit_slices` has seen
        if asked != 1 and self.bindings:
            cuts = self.modules.head_cuts(asked, self.sp)
        for path in cuts.keys() - self.sliced.keys():
            module: Any = self.modules.model.get_submodule(path)
            self.sliced[path] = SlicedAttention(module, path, module.longspan_layer, _has_cache)
        for path, sliced in self.sliced.items():
            sliced.cut = cuts.get(path)

    def _fit_slices(self, local_tokens: int) -> None:
        """Let each layer run in as few slices as keep the peak, if a batch has more tokens than all before."""
        if self.options.head_slices or self.planned is None or not self.sliced or local_tokens <= self.most_tokens:
            return
        self.most_tokens = local_tokens
        counts = self.planned.slices(local_tokens, self.options)
        for layer, count in zip(self.layers, counts, strict=True):
            cuts = self.modules.head_cuts(count, self.sp)
            for path in (path for path in self.sliced if path.startswith(f"{self.modules.names[layer]}.")):
                self.sliced[path].cut = cuts.get(path)
        self._forget_readers()

    def _forget_readers(self) -> None:
        """Let norms whose output is computed whole find out anew who reads it."""
        for norm in self.norms:
            norm.uncomputed = norm.uncomputed or None

    def _tiled(self, mlp: nn.Module) -> Tiled:
        width = max(max(p.shape[-2:]) for p in mlp.parameters() if p.dim() > 1)

        def rows(tokens: int, on_cpu: bool) -> int:
            return mlp_rows(tokens, self.hidden, width, on_cpu)

        drawing = any(map(draws, mlp.modules()))
        experts = ExpertTiles(mlp, most_mlp_tiles(self.hidden, width), draws=drawing)
        return Tiled(mlp, self.modules.names[mlp], rows, draws=drawing, experts=experts)

    # --- one forward

    def check(self, call: ForwardCall) -> None:
        if not call.model.training:
            return
        if self._checkpoints_by_itself and self.options.checkpointing != "none":
            raise LongspanError(
                f"gradient_checkpointing_enable() was called on a model that has memory.checkpointing="
                f"{self.options.checkpointing!r}: each layer would be checkpointed twice; call "
                f"gradient_checkpointing_disable(), or parallelize with checkpointing='none'"
            )
        self._reserve(call)  # here because it may raise: errors of checks reach every rank

    def before(self, call: ForwardCall) -> None:
        if call.model.training and self.auto is not None and self._set_for_batch(call, self.auto):
            on_every_rank(lambda: self._reserve(call), self.auto.sp.world_group)
        if call.model.training:
            self._fit_slices(call.info.rows * call.info.local_length)
        if call.wants_router_loss and self.options.tiled and not any(mlp.routers for mlp in self.mlps):
            raise LongspanError(
                "output_router_logits=True needs the routers' logits of all tokens, and no router was found in the "
                "experts that tiled=True runs tile by tile; use tiled=False, or output_router_logits=False"
            )
        for mlp in self.mlps:
            mlp.saves_router_logits = call.wants_router_loss

    @property
    def _checkpoints_by_itself(self) -> bool:
        """Whether transformers' own gradient checkpointing is on."""
        return any(getattr(layer, "gradient_checkpointing", False) for layer in self.layers)

    def _set_for_batch(self, call: ForwardCall, auto: AutoMemory) -> bool:
        """Choose memory options if a replica's batch is larger than all before, and return whether it is. Collective.

        Options that conflict with transformers' own gradient checkpointing are left out.
        """
        fixed: dict[str, Any] = {"cpu_offload": False}  # FSDP's: it cannot change after parallelize
        if self.modules.untiled is not None:
            fixed["tiled"] = False
        if not self.sliceable:
            fixed["head_slices"] = 1
        if self._checkpoints_by_itself:
            fixed["checkpointing"] = "none"
        info = call.info
        width = info.sp.size if info.elastic else None
        chosen = auto.for_batch(info.length, info.rows, fixed, info.segments is not None, call.patches, width)
        if chosen is None:
            return False
        memory, why = chosen
        self.set(memory, store_for(memory, auto.sp.device), why)
        return True

    def _reserve(self, call: ForwardCall) -> None:
        """Reserve room in the store for the activations that the forward saves."""
        if self.store is None or not torch.is_grad_enabled():
            return
        config = call.model.config.get_text_config()
        element = next(call.model.parameters()).dtype.itemsize
        heads = config.num_attention_heads if self.bindings else 0
        width = heads * (head_dim_of(config) or config.hidden_size // max(1, heads))
        attention = 0
        if self.options.checkpointing == "selective":
            attention = width * element + 4 * heads
        inputs, _ = layers_held(len(self.layers), self.groups.per_checkpoint)
        per_token = config.hidden_size * element * inputs + attention * len(self.layers)
        self.store.reserve(per_token * call.info.rows * call.info.local_length)


def _bindings(layer: nn.Module) -> list[LayerBinding]:
    bindings = (getattr(module, "longspan_layer", None) for module in layer.modules())
    return [binding for binding in bindings if isinstance(binding, LayerBinding)]


def _has_cache(kwargs: dict[str, Any]) -> bool:
    return any(isinstance(value, CachedInfo) for value in kwargs.values())


class MemoryModules:
    """The modules that memory options concern: decoder layers, their MLPs and norms, and the norm behind them."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.layers = decoder_layers(model)
        self.tower = tower_blocks(model)  # their activations are recomputed if those of the layers are
        self.hybrid = is_hybrid(model)  # then layers may have no MLP
        self.names = {module: name for name, module in model.named_modules()}
        self.untiled: str | None = None  # why some MLP cannot run tile by tile
        self.mlps = [mlp for layer in self.layers for mlp in self._mlps(layer)]
        for path, layer in float8_layers(model).items():
            if float8_scales_span_tokens(layer):
                self.untiled = f"{path} is in float8 with scales over all tokens, so a tile would round by its own"
        inside = (module for layer in self.layers for module in layer.modules())
        self.norms = [*filter(_is_norm, inside), *filter(_is_norm, final_norm(model))]

    def check(self, memory: Memory) -> None:
        """Raise for memory options that the model does not support."""
        if memory.tiled and self.untiled is not None:
            raise LongspanError(f"{self.untiled}; use tiled=False")
        if memory.head_slices > 1:
            AttentionSlices(self.model, 1, memory.head_slices)

    def head_cuts(self, asked: int, sp: SequenceSharding) -> dict[str, HeadCut]:
        """Return how each attention layer is cut into slices; none if that is not possible, or one slice suffices."""
        text = self.model.config.get_text_config()
        count = slices_of(asked, getattr(text, "num_attention_heads", 1) or 1, sp.ulysses_size)
        if count == 1 or sp.tensor_size > 1:
            return {}
        try:
            return AttentionSlices(self.model, count, asked).cuts()
        except LongspanError:
            if asked:
                raise
            return {}

    def _mlps(self, layer: nn.Module) -> Iterator[nn.Module]:
        mixers = mixer_layers(layer)
        attends = {*attention_layers(layer).values(), *mixers.values()}
        mlps = [
            child
            for child in layer.children()
            if not any(module in attends for module in child.modules()) and any(p.dim() > 1 for p in child.parameters())
        ]
        problem = None
        if not mlps and not self.hybrid:
            problem = f"{self.names[layer]} ({type(layer).__name__}) has no MLP of its own to run tile by tile"
        for child in mlps:
            if _takes_one(child):
                yield child
            else:
                problem = problem or (
                    f"{self.names[child]} ({type(child).__name__}) is called with more than hidden states, so it "
                    f"cannot run tile by tile"
                )
        self.untiled = self.untiled or problem


def _is_norm(module: nn.Module) -> bool:
    leaf = [*module.parameters()] and not [*module.children()]
    return "Norm" in type(module).__name__ and bool(leaf) and _takes_one(module)


def _takes_one(module: nn.Module) -> bool:
    """Return whether a module can be called with one tensor alone."""
    parameters = inspect.signature(module.forward).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return len(needed) == 1
