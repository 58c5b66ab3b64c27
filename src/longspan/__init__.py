"""longspan: train and run Transformers on sequences longer than one GPU can hold, exactly.

Public names are imported on first use, so that `longspan plan --help` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longspan import exchange as exchange
    from longspan.attn.api import attention as attention
    from longspan.attn.api import explain_kernel as explain_kernel
    from longspan.attn.api import prepare_attention as prepare_attention
    from longspan.attn.kernels.custom import kernel_with_lse as kernel_with_lse
    from longspan.attn.mask import Mask as Mask
    from longspan.attn.mask import TreeMask as TreeMask
    from longspan.attn.methods.dsp import dsp as dsp
    from longspan.comm.mesh import SequenceSharding as SequenceSharding
    from longspan.comm.mesh import init_mesh as init_mesh
    from longspan.comm.shard import global_mean as global_mean
    from longspan.core.errors import LongspanError as LongspanError
    from longspan.core.memory import Memory as Memory
    from longspan.diffusion.check import shard_target as shard_target
    from longspan.elastic.batches import elastic_batches as elastic_batches
    from longspan.elastic.batches import schedule as schedule
    from longspan.hf.batch.shard import shard_batch as shard_batch
    from longspan.hf.batch.trees import pack_tree as pack_tree
    from longspan.hf.cache.kv_cache import ShardedCache as ShardedCache
    from longspan.hf.compile import compile_layers as compile_layers
    from longspan.hf.forward.distillation import distillation_loss as distillation_loss
    from longspan.hf.forward.logprobs import token_logprobs as token_logprobs
    from longspan.hf.forward.loss import causal_lm_loss as causal_lm_loss
    from longspan.hf.forward.mixer_functions import register_mixer as register_mixer
    from longspan.hf.loading import from_pretrained as from_pretrained
    from longspan.hf.nonfinite import find_nonfinite as find_nonfinite
    from longspan.hf.parallelize import parallelize as parallelize
    from longspan.hf.state import explain as explain
    from longspan.hf.weights.gradients import no_sync as no_sync
    from longspan.mixers.linear_attention import linear_attention as linear_attention
    from longspan.mixers.state_passing import state_passing as state_passing
    from longspan.trainers.mixin import TrainerMixin as TrainerMixin
    from longspan.trainers.mixin import trainer as trainer

__version__ = "0.1.0"

_DEFINED_IN = {
    "LongspanError": "longspan.core.errors",
    "Mask": "longspan.attn.mask",
    "Memory": "longspan.core.memory",
    "SequenceSharding": "longspan.comm.mesh",
    "ShardedCache": "longspan.hf.cache.kv_cache",
    "TrainerMixin": "longspan.trainers.mixin",
    "TreeMask": "longspan.attn.mask",
    "attention": "longspan.attn.api",
    "causal_lm_loss": "longspan.hf.forward.loss",
    "compile_layers": "longspan.hf.compile",
    "distillation_loss": "longspan.hf.forward.distillation",
    "dsp": "longspan.attn.methods.dsp",
    "elastic_batches": "longspan.elastic.batches",
    "explain": "longspan.hf.state",
    "explain_kernel": "longspan.attn.api",
    "find_nonfinite": "longspan.hf.nonfinite",
    "from_pretrained": "longspan.hf.loading",
    "kernel_with_lse": "longspan.attn.kernels.custom",
    "prepare_attention": "longspan.attn.api",
    "global_mean": "longspan.comm.shard",
    "init_mesh": "longspan.comm.mesh",
    "linear_attention": "longspan.mixers.linear_attention",
    "no_sync": "longspan.hf.weights.gradients",
    "pack_tree": "longspan.hf.batch.trees",
    "parallelize": "longspan.hf.parallelize",
    "register_mixer": "longspan.hf.forward.mixer_functions",
    "schedule": "longspan.elastic.batches",
    "shard_batch": "longspan.hf.batch.shard",
    "shard_target": "longspan.diffusion.check",
    "state_passing": "longspan.mixers.state_passing",
    "token_logprobs": "longspan.hf.forward.logprobs",
    "trainer": "longspan.trainers.mixin",
}
_MODULES = ("exchange",)

__all__ = [*sorted(_DEFINED_IN), *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"longspan.{name}")
    if name not in _DEFINED_IN:
        raise AttributeError(f"module 'longspan' has no attribute {name!r}; it has {', '.join(__all__)}")
    try:
        value = getattr(importlib.import_module(_DEFINED_IN[name]), name)
    except ModuleNotFoundError as error:
        from longspan.core.errors import missing_package, not_installed

        package = missing_package(error)
        if package is None:
            raise
        raise not_installed(f"longspan.{name}", package) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
