"""Peak memory of one GPU, item by item.

A step has several peak candidates, such as the loss or the backward of the first layer. Each is summed from its items;
the largest is reported. `training_memory.py` and `forward_memory.py` list the candidates, and
`benchmarks/plan_accuracy.py` compares the sum with measured peaks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from longspan.plan.cost.forward_memory import PREFILL_TILES, cache_on_device, forward_peaks
from longspan.plan.cost.saved import cost_context
from longspan.plan.cost.training_memory import training_peaks
from longspan.plan.cost.weights import on_host, sums_gradients_once, weights_at_rest

if TYPE_CHECKING:
    from longspan.plan.hardware import Hardware
    from longspan.plan.job import Job, Mesh
    from longspan.plan.models.shape import ModelShape

ITEMS = {
    "weights": "weights at rest: this GPU's shard",
    "optimizer": "optimizer state",
    "gradients": "gradients at rest, and of the layers in their backward",
    "gathered_weights": "weights gathered for compute: a layer, and the next one prefetched; embedding, head",
    "activations_hidden": "saved for the backward: layers' inputs, inputs of norms and products",
    "activations_attention": "saved for the backward: Q, K, V, outputs, log-sum-exps",
    "activations_mlp": "saved for the backward: intermediates of the MLPs",
    "qkv": "Q, K and V of this GPU",
    "attention_workspace": "buffers of the all-to-all, the attention's output, a ring's fp32 sums",
    "mlp": "intermediates of the current MLP",
    "hidden": "current hidden states, and their gradients",
    "logits": "a tile of logits and its gradient; or all of them",
    "kv_cache": "keys and values of all layers; of two if the cache is offloaded to the host",
    "comm_buffers": "buffers of the ring: current and next KV block, gradients in flight",
    "reserve": "held by torch, CUDA and NCCL themselves",
}
"""The items of `memory`, with a description."""


def memory(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware, tiles: int = PREFILL_TILES) -> dict[str, int]:
    """Return the bytes of every item of `ITEMS` at the peak, max over ranks.

    Args:
        model: the model.
        job: what is computed.
        mesh: the mesh.
        hardware: the kind of GPU.
        tiles: of MLP and norms in prefill and decode, unless the job sets them.
    """
    if job.mode == "train":
        c = cost_context(model, job, mesh, hardware)
        at_rest = {} if on_host(job, c) else weights_at_rest(model, job, mesh)
        peaks = training_peaks(model, job, mesh, c, once=sums_gradients_once(model, job, mesh, hardware))
    else:
        one_forward = job
        if job.mode == "prefill" and job.prefill_chunk is not None:
            one_forward = replace(job, context=min(job.prefill_chunk, job.context))
        c = cost_context(model, one_forward, mesh, hardware)
        at_rest = {} if on_host(job, c) else weights_at_rest(model, job, mesh)
        at_rest["kv_cache"] = cache_on_device(model, job, mesh, hardware.on_cpu)
        peaks = forward_peaks(model, one_forward, mesh, c, tiles)
    at_rest["reserve"] = int(hardware.reserve_bytes)
    peak = max(peaks, key=lambda items: sum(items.values()))
    return {name: int(at_rest.get(name, 0) + peak.get(name, 0)) for name in ITEMS}
