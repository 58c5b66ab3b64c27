"""What the planner needs: the shape of a transformers model, this device, and `memory="auto"`, which asks the planner.

The shape comes from the config where the planner knows the family, else from the modules.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoModelForCausalLM, PreTrainedModel

from longspan.comm.consistency import gather_numbers
from longspan.comm.mesh import SequenceSharding
from longspan.core.errors import LongspanError
from longspan.core.experts import Experts
from longspan.core.memory import Memory
from longspan.core.parallel import TensorStyle
from longspan.hf.support import attention_layers, decoder_layers, mixer_layers
from longspan.hf.vision import core_of
from longspan.plan.hardware import CATALOGUE, Hardware, read_hardware
from longspan.plan.job import Job, Mesh
from longspan.plan.layers import CAUSAL, AttendedKeys, Bidirectional, Chunk, Mlp, Softmax, Window
from longspan.plan.models import LayerShape, ModelShape, Parameter, is_family, shape_from_layers
from longspan.plan.models.read import shape_from_config
from longspan.plan.models.tower import Pictures
from longspan.plan.models.tuning import Tuning, tuned_shape
from longspan.plan.suggestions import choose_memory


def config_shape(config: Any) -> ModelShape:
    """Return the shape of a Hugging Face config."""
    return shape_from_config(config.to_dict(), type(config).__name__.removesuffix("Config"))


def shape_of_model(model: PreTrainedModel) -> ModelShape:
    """Return the shape of `model`, which may be on the meta device."""
    if core_of(model) is not None:
        return config_shape(model.config)
    config = model.config.get_text_config()
    if is_family(config.to_dict()):
        return config_shape(config)
    try:
        return shape_from_modules(model)
    except (AttributeError, IndexError, TypeError) as error:  # a config that names its sizes differently
        raise LongspanError(f"the planner cannot read the sizes of {type(model).__name__}: {error}") from error


def tuning_of(model: PreTrainedModel) -> Tuning:
    """Return which weights of a model are trained, by PEFT's LoRA or because the others are frozen.

    If the planner reads the family from its modules, all weights count as trained: an upper bound of memory.
    """
    if core_of(model) is not None or not is_family(model.config.get_text_config().to_dict()):
        return Tuning()
    adapters: dict[str, Any] = {path: m for path, m in model.named_modules() if getattr(m, "lora_A", None)}
    if adapters:
        rank = {path: max(adapter.r.values()) for path, adapter in adapters.items()}
        parameters = {}  # PEFT wraps a module once for each
        for path, adapter in adapters.items():
            if hasattr(adapter, "parameter_name"):
                module = path.partition(".base_layer")[0].rpartition(".")[2]
                parameters[f"{module}.{adapter.parameter_name}"] = rank.pop(path)
        targets = tuple(sorted({path.rpartition(".")[2] for path in rank})) or ("none",)
        dora = any("lora_magnitude" in name for name, _ in model.named_parameters())
        return Tuning(
            max(rank.values(), default=1), targets, dora=dora, quantize=getattr(model, "is_loaded_in_4bit", False),
            parameters=tuple(parameters.items()),
        )  # fmt: skip
    return Tuning(freeze=tuple(name for name, p in model.named_parameters() if not p.requires_grad))


def shape_of(config: Any) -> ModelShape:
    """Return the shape of the causal language model of a config.

    If the planner does not know the family, the model is built on the meta device.
    """
    if is_family(config.get_text_config().to_dict()):
        return config_shape(config)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise LongspanError(f"{type(config).__name__} cannot be made into a causal language model: {error}") from error
    return shape_of_model(model)


def shape_from_modules(model: PreTrainedModel) -> ModelShape:
    """Return the shape that the modules of `model` have."""
    config = model.config.get_text_config()
    blocks = decoder_layers(model)
    if not blocks:
        raise LongspanError(f"{type(model).__name__} has no list of layers with attention, so it cannot be planned")
    kinds: dict[Any, LayerShape] = {}
    layers = []
    for index, block in enumerate(blocks):
        parts = (_mixer(block, config, index), *_mlp(block, config))
        layers.append(kinds.setdefault(parts, LayerShape(*parts)))
    repeats = -(-getattr(config, "num_hidden_layers", len(layers)) // len(layers))  # ALBERT runs one layer many times
    return shape_from_layers(
        config.to_dict(),
        type(model).__name__,
        d_model=config.hidden_size,
        layers=tuple(layers * max(1, repeats)),
        root=tuple(_root(model, blocks)),
        tied=_tied(model),
        rotary=any("Rotary" in type(module).__name__ for module in model.modules()),
    )


# Attention


def _mixer(block: nn.Module, config: Any, index: int) -> Softmax:
    if mixer_layers(block):
        raise LongspanError(
            f"layer {index} ({type(block).__name__}) is recurrent, and the planner does not know its model type; "
            f"choose memory options yourself, such as memory='longest'"
        )
    attention = next(iter(attention_layers(block).values()), None)
    if attention is None:
        raise LongspanError(f"layer {index} ({type(block).__name__}) has no attention, so it cannot be planned")
    keys = _attended_keys(attention, config, index)
    heads = _first(config, "num_attention_heads", "n_head", "n_heads")
    if getattr(config, "kv_lora_rank", None):  # latent attention: DeepSeek
        rope = config.qk_rope_head_dim
        dim = config.qk_nope_head_dim + rope
        return Softmax(heads, heads, dim, config.v_head_dim, keys, config.kv_lora_rank + rope, rope)
    dim = _first(attention, "head_dim", "attention_head_size") or getattr(config, "head_dim", None)
    dim = dim or config.hidden_size // heads
    heads = _width(attention, "q_proj", "query", "q_lin") // dim or heads
    groups = getattr(attention, "num_key_value_groups", None)
    kv = _width(attention, "k_proj", "key", "k_lin") // dim or (heads // groups if groups else None)
    kv = kv or _first(config, "num_key_value_heads", "num_kv_heads") or heads
    sinks = isinstance(getattr(attention, "sinks", None), nn.Parameter)
    return Softmax(heads, kv, dim, _width(attention, "v_proj", "value", "v_lin") // kv or dim, keys, sinks=sinks)


def _attended_keys(attention: nn.Module, config: Any, index: int) -> AttendedKeys:
    types = getattr(config, "layer_types", None)
    kind = types[index] if types and index < len(types) else None
    window = getattr(attention, "sliding_window", None)
    if kind == "sliding_attention" or (not types and getattr(config, "use_sliding_window", True)):
        window = window or getattr(config, "sliding_window", None)
    if kind == "chunked_attention":
        return Chunk(config.attention_chunk_size)
    if isinstance(window, int) and window > 0 and kind != "full_attention":
        return Window(window)
    return CAUSAL if getattr(attention, "is_causal", True) else Bidirectional()


def _width(module: nn.Module, *names: str) -> int:
    """Return the output width of the first of these linear layers; 0 if there is none."""
    layer = next((getattr(module, name) for name in names if hasattr(module, name)), None)
    return int(getattr(layer, "out_features", 0))


def _first(owner: Any, *names: str) -> Any:
    return next((getattr(owner, name) for name in names if getattr(owner, name, None) is not None), None)


# MLP


def _mlp(block: nn.Module, config: Any) -> tuple[Mlp, tuple[Parameter, ...]]:
    """Return the MLP of a layer, and all weights of the layer, those of the MLP under the names `mlp....`."""
    attends = {name.partition(".")[0] for name in attention_layers(block)}
    matrices = [n for n, p in block.named_parameters() if n.partition(".")[0] not in attends and p.dim() > 1]
    owners = {name.partition(".")[0] for name in matrices}
    parameters = tuple(
        Parameter(_renamed(name, owners) if name.partition(".")[0] in owners else name, tuple(p.shape))
        for name, p in block.named_parameters()
    )
    return _mlp_of([p for p in parameters if p.name.startswith("mlp.") and len(p.shape) > 1], block, config), parameters


def _renamed(name: str, owners: set[str]) -> str:
    at = name.find("experts.")
    if at >= 0 and "shared" not in name[:at]:
        return f"mlp.{name[at:]}"
    return f"mlp.{name.partition('.')[2] if len(owners) == 1 else name}"


def _mlp_of(matrices: list[Parameter], block: nn.Module, config: Any) -> Mlp:
    d = config.hidden_size
    routed = [p for p in matrices if len(p.shape) == 3 or p.name.startswith("mlp.experts.")]
    if not routed:
        ffn, gated = _widths(matrices, d)
        return Mlp(ffn, gated)
    stacked = [p.shape[0] for p in routed if len(p.shape) == 3]
    numbered = {p.name.split(".")[2] for p in routed if len(p.shape) == 2}
    experts = stacked[0] if stacked else len(numbered)
    each = [Parameter(p.name, p.shape[-2:]) for p in routed if len(p.shape) == 3 or p.name.split(".")[2] == "0"]
    ffn, gated = _widths(each, d)
    chosen = _first(config, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k")
    tops = (getattr(module, "top_k", None) for module in block.modules())
    chosen = int(chosen or next((top for top in tops if isinstance(top, int)), 1))
    shared = sum(p.numel for p in matrices if p not in routed and experts not in p.shape)
    return Mlp(ffn, gated, experts, min(chosen, experts), shared // ((3 if gated else 2) * d))


def _widths(matrices: list[Parameter], d: int) -> tuple[int, bool]:
    """Return the intermediate size of an MLP, and whether it is gated: by two matrices, or by one of twice the size."""
    widths = [max(p.shape) if min(p.shape) == d else min(p.shape) if max(p.shape) == d else 0 for p in matrices]
    widest = max(widths, default=0)
    if widest == 0:
        return d, False
    fused = widest % 2 == 0 and widths.count(widest) == 1 and widest // 2 in widths
    return (widest // 2 if fused else widest), fused or widths.count(widest) >= 3


# Around the layers


def _root(model: PreTrainedModel, blocks: list[nn.Module]) -> Iterator[Parameter]:
    """Yield the weights outside the layers: the embedding first, the head last."""
    inside = {id(p) for block in blocks for p in block.parameters()}
    head = model.get_output_embeddings()
    first = model.get_input_embeddings().weight
    last = None if head is None or _tied(model) else head.weight
    outside = {id(p): (name, p) for name, p in model.named_parameters() if id(p) not in inside}
    if _tied(model) and head is not None and head.weight is not first:
        outside.pop(id(head.weight), None)
    order = [
        id(first),
        *(key for key in outside if key not in (id(first), id(last))),
        *([] if last is None else [id(last)]),
    ]
    for key in order:
        name, p = outside[key]
        yield Parameter(name, tuple(p.shape))


def _tied(model: PreTrainedModel) -> bool:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None:
        return True
    return head.weight is embedding.weight or bool(model.config.get_text_config().tie_word_embeddings)


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


MODALITIES = ("image", "video")


class AutoMemory:
    """Choose memory options by the planner.

    `largest`: tokens of the largest batch so far. `patches`: of images and of video, on the rank that encodes most.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sp: SequenceSharding,
        fsdp: bool,
        mp_policy: MixedPrecisionPolicy | None,
        style: TensorStyle,
        experts: Experts = 1,
    ) -> None:
        self.sp, self.largest, self.size, self.patches = sp, 0, (1, 0), [0] * len(MODALITIES)
        self.replicas_differ = sp.data_size > 1
        self.tuning = tuning_of(model)
        self.shape = tuned_shape(shape_of_model(model), self.tuning)
        compute_dtype = (mp_policy and mp_policy.param_dtype) or next(model.parameters()).dtype
        self.job = Job(
            context=1,
            dtype="fp32" if compute_dtype == torch.float32 else "bf16",
            weight_sharding=fsdp and sp.world_size > 1,
            tensor_style=style,
            experts=experts,
        )
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
        """Return the fastest options that fit the smallest device of all ranks, and the reason; None if no replica's
        batch is larger than all before, in tokens or patches. Collective.

        This replica has `rows` sequences of `length` tokens, or of packed documents; `patches` are by modality those of
        the rank that encodes most; the options in `fixed` stay. Replicas need the same options: a recomputation gathers
        weights, which all ranks do together. `width` ranks share an elastic batch.
        """
        sp = self.sp
        if width is not None:  # as many tokens on each rank as a sequence of all ranks
            length *= sp.size // width
        encoded = [patches.get(kind, 0) for kind in MODALITIES]
        if sp.host_group is not None and (self.replicas_differ or width is not None):
            batches = gather_numbers([length, rows, documents, *encoded], sp.host_group, torch.device("cpu"))
            length, rows, *_ = max(batches, key=lambda batch: batch[0] * batch[1])
            documents = any(has_documents for _, _, has_documents, *_ in batches)
            encoded = [
                max(numbers) for numbers in zip(*(of_pictures for _, _, _, *of_pictures in batches), strict=True)
            ]
        largest = [max(pair) for pair in zip(encoded, self.patches, strict=True)]
        if length * rows <= self.largest:
            if largest == self.patches:
                return None
            length, rows = self.size  # the options must still fit it
        if self.hardware is None:
            least = torch.tensor(hardware_of(sp.device).memory_bytes, dtype=torch.float64, device=sp.device)
            if sp.job_size > 1:
                dist.all_reduce(least, op=dist.ReduceOp.MIN)
            self.hardware = hardware_of(sp.device, float(least))
        job = dataclasses.replace(
            self.job, context=length, batch=rows * sp.data_size, documents=documents, pictures=self._pictures(largest)
        )
        mesh = Mesh(sp.data_size, sp.ring_size, sp.ulysses_size, sp.tensor_size)
        chosen = choose_memory(self.shape, job, mesh, self.hardware, self.tuning.fixed(fixed))
        self.largest, self.size, self.patches = length * rows, (length, rows), largest
        return chosen

    def _pictures(self, patches: list[int]) -> tuple[Pictures, ...]:
        """Return pictures for the planner of which every rank encodes as many patches as the one with most."""
        if self.shape.tower is None:
            return ()
        merge = self.shape.tower.merge
        return tuple(
            Pictures(kind, self.sp.size, merge, number // merge)
            for kind, number in zip(MODALITIES, patches, strict=True)
            if number
        )
