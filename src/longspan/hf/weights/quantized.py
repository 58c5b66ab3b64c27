"""Linear layers whose frozen weights have 4 bits a value (bitsandbytes): made while weights are read, and restored.

A weight is a parameter of bytes, [values / 2, 1], which FSDP shards. Its scales, an eighth of a bit a value and more,
are attributes of the layer (`quant_state`), which every rank holds.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from longspan.comm.mesh import SequenceSharding
from longspan.comm.weights import local_part
from longspan.compat.torch_api import FSDP_KEEPS_INTEGERS
from longspan.core.errors import LongspanError
from longspan.core.memory import Memory

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig, PreTrainedModel


def nf4(compute_dtype: torch.dtype) -> BitsAndBytesConfig:
    """Return the quantization of QLoRA: 4-bit NormalFloat, with scales that are quantized to 8 bits themselves."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
    )


def layers_in_4_bits(model: nn.Module) -> dict[str, Any]:
    """Return bitsandbytes' 4-bit linear layers by their paths."""
    bnb = sys.modules.get("bitsandbytes")  # imported by whoever made such a layer
    return {} if bnb is None else {p: m for p, m in model.named_modules() if isinstance(m, bnb.nn.Linear4bit)}


def number_of_weights(model: nn.Module) -> int:
    """Return the number of a model's weights; a byte holds two of 4 bits."""
    packed = (m.weight for m in layers_in_4_bits(model).values())
    more: int = sum(p.numel() * (2 * p.element_size() - 1) for p in packed)
    return more + sum(p.numel() for p in model.parameters())


def check_quantized(
    model: PreTrainedModel, sp: SequenceSharding, policy: MixedPrecisionPolicy | None, memory: Memory, sharded: bool
) -> None:
    """Raise for quantized weights that cannot be sharded as asked."""
    layers = layers_in_4_bits(model)
    if not layers:
        method = getattr(model, "quantization_method", None)
        if method is not None and (sharded or sp.tensor_size > 1):
            raise LongspanError(
                f"the weights of {type(model).__name__} are quantized ({getattr(method, 'value', method)}), and would "
                "lose their scales when they are sharded; load it with BitsAndBytesConfig(load_in_4bit=True), which "
                "can be sharded, or dequantize it, or use fsdp=False on a mesh without a tensor axis"
            )
        return
    path, layer = next(iter(layers.items()))
    what = f"layer {path} has weights in 4 bits"
    if sp.tensor_size > 1:
        raise LongspanError(
            f"{what}, packed in blocks that cross rows and columns, so `tensor={sp.tensor_size}` cannot shard them; "
            f"use `ulysses={sp.ulysses_size * sp.tensor_size}` instead"
        )
    if memory.cpu_offload:
        raise LongspanError(f"{what}, which cpu_offload=True does not move back to the device; leave it out")
    if getattr(layer.quant_state, "packing_format_for_cpu", False):
        raise LongspanError(f"{what} that inference on the CPU has packed anew; parallelize it before its first call")
    casts = sharded and policy is not None and policy.param_dtype is not None
    if casts and not FSDP_KEEPS_INTEGERS and not layer.weight.is_floating_point():
        raise LongspanError(
            f"{what} in bytes, which the FSDP of torch {torch.__version__} casts to {policy and policy.param_dtype}; "
            "use torch 2.13 or newer, or load it with BitsAndBytesConfig(bnb_4bit_quant_storage=torch.bfloat16)"
        )


def prepare_layers(model: nn.Module, device: torch.device) -> None:
    """Move the scales to the device, and keep the layers from packing gathered weights anew in inference on a CPU."""
    for layer in layers_in_4_bits(model).values():
        layer.support_avx512bf16_for_cpu = False
        if layer.quant_state is not None:  # None: still to be loaded
            layer.quant_state.to(device)


def to_4_bits(model: PreTrainedModel, compute_dtype: torch.dtype) -> dict[str, Any]:
    """Replace the linear layers of a model of stubs, in place, by 4-bit ones whose weights are stubs.

    transformers decides which layers those are: not the LM head. Return them by the names of their weights.
    """
    from transformers.quantizers import AutoHfQuantizer

    parameters = dict(model.named_parameters(remove_duplicate=False))
    quantizer: Any = AutoHfQuantizer.from_config(nf4(compute_dtype), pre_quantized=False)
    quantizer.preprocess_model(model=model, device_map={"": "cpu"})
    layers = {}
    for path, layer in layers_in_4_bits(model).items():
        name = f"{path}.weight"
        packed = torch.zeros((), dtype=torch.uint8).expand((parameters[name].numel() + 1) // 2, 1)
        attributes = vars(layer.weight)
        layer.weight = type(layer.weight)(packed, **{**attributes, "bnb_quantized": True})
        if layer.bias is not None:
            layer.bias = parameters[f"{path}.bias"]
        layers[name] = layer
    model.is_loaded_in_4bit = True  # PEFT asks for it
    return layers


def quantize_into(layer: Any, weight: Tensor, rows: slice) -> None:
    """Quantize the whole weight of a layer of `to_4_bits`; keep its scales, and `rows` of its bytes."""
    from bitsandbytes.functional import quantize_4bit
    from transformers.pytorch_utils import Conv1D

    mine = local_part(layer.weight)
    whole = weight.T if issubclass(layer.source_cls, Conv1D) else weight  # GPT-2 stores it transposed
    packed, layer.quant_state = quantize_4bit(
        whole.contiguous().to(mine.device), compress_statistics=True, quant_type="nf4"
    )
    layer.quant_state.dtype = layer.compute_dtype  # of the values that a backward restores
    mine.copy_(packed[rows])


def split_state(model: nn.Module, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a state dict without 4-bit weights and their scales, and the bytes of those weights."""
    names = {f"{path}.weight" for path in layers_in_4_bits(model)}
    if not names:
        return dict(state), {}
    rest = {k: x for k, x in state.items() if k not in names and k.rpartition(".weight.")[0] + ".weight" not in names}
    return rest, {name: state[name] for name in names}


def dequantize(model: nn.Module, state: dict[str, Any]) -> None:
    """Replace the bytes of 4-bit weights in a whole state dict by their values, in fp32."""
    layers = layers_in_4_bits(model)
    if not layers:
        return
    from transformers.pytorch_utils import Conv1D

    rest, packed = split_state(model, state)
    state.clear()
    state.update(rest)
    for path, layer in layers.items():
        name = f"{path}.weight"
        values = values_of(layer, torch.float32, packed.pop(name)).cpu()
        state[name] = values.T.contiguous() if issubclass(layer.source_cls, Conv1D) else values


def values_of(layer: Any, dtype: torch.dtype, packed: Tensor | None = None) -> Tensor:
    """Return a layer's 4-bit weight, or `packed` in its format, as the values that the layer multiplies by."""
    from bitsandbytes.functional import dequantize_4bit

    scales = copy.copy(layer.quant_state)
    scales.dtype = dtype
    values: Tensor = dequantize_4bit((layer.weight if packed is None else packed).to(scales.absmax.device), scales)
    return values
