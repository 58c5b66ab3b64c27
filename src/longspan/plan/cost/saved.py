"""What a layer saves for its backward, and what each memory option changes, in bytes, tensor by tensor.

The formulas follow transformers' Llama layer and `longspan.attention`; tests compare what a layer saves with what
autograd does. Experts and linear attention are estimates. A layer's mixing says what attention saves
(`longspan.plan.layers`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from longspan.core.tile_sizes import FEWEST_ROWS, layers_held, layers_per_checkpoint
from longspan.plan.cost.weights import computed, layer_gradient
from longspan.plan.job import CostContext, Job
from longspan.plan.layers.base import Parameter, SavedActivations
from longspan.plan.shape import LayerShape

OFFLOADED_INPUTS = 2
"""Layers' inputs that are on the GPU under offload: one is moved while the other is made, or used."""

TILE = 0.25
"""A tile's intermediates over the hidden states, in bytes, with `tiled=True`."""

WEIGHT_SUM = 4
"""Bytes per MLP weight in which a tiled MLP accumulates a layer's gradients: fp32."""


# ---------------------------------------------------------------------------------------------------------------------
# Of one layer, in bytes per token of a rank.


def saved_per_token(layer: LayerShape, c: CostContext) -> SavedActivations:
    """Return what one layer saves for its backward."""
    before, behind = _around_attention(layer, c)
    mixing = layer.mixing
    attention = mixing.saved(c)
    if len(mixing.slices(c)) > 1:  # the rest is recomputed
        return SavedActivations((before + behind) // c.hidden_shards, attention, _mlp_saved(layer, c))
    q_norm = next((p for p in layer.parameters if "q_norm" in p.name), None)
    if q_norm is not None:
        heads = (mixing.q_heads + mixing.kv_heads) // c.mesh.tensor
        tiled = c.job.memory.tiled
        # Norms of each head (Qwen3) save a number per head; a norm of all of Q and one of all of K (OLMo-2) two.
        numbers = 1 if tiled else heads if q_norm.numel == mixing.head_dim else 2
        attention += _norm_saved(heads * mixing.head_dim, c, q_norm.trained) + 4 * (numbers - 1)
    attention += _adapters_saved(layer, c, mlp=False)
    return SavedActivations((before + behind) // c.hidden_shards, attention, _mlp_saved(layer, c))


def checkpoint_per_token(layer: LayerShape, c: CostContext) -> SavedActivations:
    """Return what checkpointing saves of a layer: its input, and parts of its attention."""
    return SavedActivations(stream_bytes(c) // c.hidden_shards, layer.mixing.checkpointed(c))


def recomputed_per_token(layer: LayerShape, c: CostContext) -> SavedActivations:
    """Return what a layer saves while it is recomputed, besides its checkpoint."""
    checkpoint = SavedActivations(attention=layer.mixing.checkpointed(c))
    if c.job.memory.tiled:  # the first norm's input is the layer's
        checkpoint += SavedActivations(hidden=stream_bytes(c) // c.hidden_shards)
    return saved_per_token(layer, c) - checkpoint


def freed_per_token(layer: LayerShape, c: CostContext) -> SavedActivations:
    """Return the part of `saved_per_token` that is freed when the backward reaches the attention itself."""
    _, behind = _around_attention(layer, c)
    after_mixing = SavedActivations(hidden=behind // c.hidden_shards, mlp=_mlp_saved(layer, c))
    return layer.mixing.freed(after_mixing, c)


def stream_bytes(c: CostContext) -> int:
    """Return the bytes per token of the residual stream, which is a layer's input."""
    return c.d * c.b


def norm_bytes(c: CostContext) -> int:
    """Return the bytes per token that a norm of hidden states saves."""
    return _norm_saved(c.d, c)


def _norm_saved(features: int, c: CostContext, trained: bool = True) -> int:
    """Return an RMSNorm's fp32 input, one number, and for its weight the normalised input; in tiles the input alone."""
    given = features * c.b
    return given if c.job.memory.tiled else features * 4 + 4 + given * trained


def _around_attention(layer: LayerShape, c: CostContext) -> tuple[int, int]:
    """Return what norms and products save before the attention, and behind it.

    A layer of attention or an MLP alone has one norm and one input of products.
    """
    norms = 2 if any("post_feedforward" in p.name for p in layer.parameters) else 1
    normed = norms * _norm_saved(c.d, c, any(p.trained for p in _norms(layer)))
    has_mixing, has_mlp = layer.mixing.q_heads > 0, layer.mlp.width > 0
    if c.job.memory.tiled:  # inputs of products are recomputed from those of the norms
        return normed * has_mixing, normed * has_mlp
    # A linear layer saves its input: one tensor for Q, K and V and one for gate and up. An RMSNorm ends in a product,
    # which is recomputed like an activation.
    mlp_input = c.b * c.d
    if recomputes_mlp_act(c.job) and not any(p.name.endswith("bias") for p in _norms(layer)):
        mlp_input = 0
    in_attention, in_mlp = (
        any(p.trained for p in layer.parameters if len(p.shape) > 1 and p.name.startswith("mlp.") == of_mlp)
        for of_mlp in (False, True)
    )
    before, behind = normed + c.b * c.d * in_attention, normed + mlp_input * in_mlp
    return before * has_mixing, behind * has_mlp


def _norms(layer: LayerShape) -> list[Parameter]:
    return [p for p in layer.parameters if "norm" in p.name or "ln_" in p.name]


def _mlp_saved(layer: LayerShape, c: CostContext) -> int:
    if c.job.memory.tiled:  # recomputed, a tile at a time
        return 0
    saved = layer.mlp.saved(c) // c.mesh.tensor + _adapters_saved(layer, c, mlp=True)
    saved += _adapted_experts(layer, c) // c.tokens
    return saved - (_mlp_act_bytes(layer, c) if recomputes_mlp_act(c.job) else 0)


def _adapters_saved(layer: LayerShape, c: CostContext, *, mlp: bool) -> int:
    """Return the bytes per token between LoRA's two matrices; of stacked experts, LoRA has no activations."""
    adapters = (p for p in layer.parameters if ".lora_A." in p.name and ".experts." not in p.name)
    return c.b * sum(p.shape[0] for p in adapters if p.name.startswith("mlp.") == mlp)


def _adapted_experts(layer: LayerShape, c: CostContext) -> int:
    """Return the bytes of the sum of experts and their LoRA, which PEFT computes and autograd saves."""
    adapted = {p.name.partition(".lora_A.")[0] for p in layer.parameters if ".lora_A." in p.name}
    held = (p.numel for p in computed(layer, c) if ".experts." in p.name and p.name in adapted)
    return c.b * sum(held) // c.mesh.tensor


# ---------------------------------------------------------------------------------------------------------------------
# MLP and norms in a backward, in bytes.


def recomputes_mlp_act(job: Job) -> bool:
    """Whether the MLP's backward recomputes the activation function; with checkpoints or tiles all is recomputed."""
    memory = job.memory
    return job.mode == "train" and memory.checkpointing == "none" and not memory.tiled


def _mlp_act_bytes(layer: LayerShape, c: CostContext) -> int:
    """Return the bytes per token of what an MLP computes elementwise from its products."""
    return layer.mlp.saved_intermediates // 2 * c.b * layer.mlp.width // c.mesh.tensor


def mlp_tiles(layer: LayerShape, c: CostContext) -> int:
    """Return the number of tiles of tokens in which the layer's MLP runs."""
    if not c.job.memory.tiled:
        return 1
    wanted = round(_mlp_intermediates(layer, c) / (TILE * c.d * c.b))
    return max(1, min(c.tokens // FEWEST_ROWS[False], wanted))


def _mlp_intermediates(layer: LayerShape, c: CostContext) -> int:
    """Return the bytes per token of an MLP's backward: what its forward saves, and two gradients."""
    return (layer.mlp.saved(c) + 2 * c.b * layer.mlp.width) // c.mesh.tensor


def mlp_backward_bytes(layer: LayerShape, c: CostContext) -> tuple[int, int]:
    """Return what an MLP's backward holds besides saved activations, and its sums of weights' gradients.

    Two gradients of the widest intermediate, and what is recomputed. In tiles, all intermediates of one tile and the
    norm's; gradients are then accumulated in fp32, unless they are fp32 already.
    """
    if not c.job.memory.tiled:
        recomputed = _mlp_act_bytes(layer, c) * c.tokens if recomputes_mlp_act(c.job) else 0
        recomputed += _adapted_experts(layer, c)  # their gradient
        return 2 * c.b * layer.mlp.width * c.tokens // c.mesh.tensor + recomputed, 0
    tiles = mlp_tiles(layer, c)
    rows = -(-c.tokens // tiles)
    accumulated = tiles > 1 and c.job.dtype != "fp32" and c.job.weight_sharding
    matrices = (p for p in computed(layer, c) if p.name.startswith("mlp.") and len(p.shape) > 1 and p.trained)
    sums = WEIGHT_SUM * sum(p.numel for p in matrices) // c.mesh.tensor if accumulated else 0
    return _mlp_intermediates(layer, c) * rows + 3 * 4 * c.d * rows + _adapted_experts(layer, c), sums


# ---------------------------------------------------------------------------------------------------------------------
# Of all layers, at four times in a step.


def saved_in_a_step(c: CostContext) -> tuple[SavedActivations, ...]:
    """Return what is saved at the loss, and in the backward of the last layer, the one before it, and the first."""
    n = len(c.model.layers)
    group = layers_per_checkpoint(n, c.job.memory.checkpointing == "grouped")
    inputs, most_inputs = layers_held(n, group)
    # Without checkpointing a layer saves all, and recomputes nothing.
    checkpointed = c.job.memory.checkpointing != "none"
    saved_of = checkpoint_per_token if checkpointed else saved_per_token
    saved = [(saved_of(layer, c) * c.tokens, count) for layer, count in c.model.layer_kinds]
    largest = _largest(each for each, _ in saved)
    recomputed = SavedActivations()
    if checkpointed:
        recomputed = _largest(recomputed_per_token(layer, c) * c.tokens for layer, _ in c.model.layer_kinds)
    layer_input = SavedActivations(hidden=stream_bytes(c) // c.hidden_shards * c.tokens)
    # In the first group's backward its recomputed inputs are freed as gradients arrive.
    gradient = min(layer_gradient(layer, c) for layer, _ in c.model.layer_kinds)
    first_group = SavedActivations(hidden=max(0, layer_input.hidden - gradient) * (min(group, n) - 1))
    in_first = largest + first_group + recomputed
    if c.offloads:
        # A layer's checkpoint in its backward, and the input of the layer before it. Its own input is freed once it is
        # recomputed, unless a tiled norm saves it, or it is the last layer's and still on its way out.
        stays = c.job.memory.tiled or c.job.memory.recomputes_layers
        held = OFFLOADED_INPUTS if stays else 1
        last, before = (largest + layer_input * (min(layers, held) - 1) for layers in (n, max(1, n - 1)))
        if group > 1:  # recomputed inputs stay here, and fewer are offloaded
            hidden = layer_input.hidden * min(min(inputs, OFFLOADED_INPUTS) + group - 1, most_inputs)
            last = before = replace(last, hidden=hidden)
        at_loss = SavedActivations(hidden=max(last.hidden, layer_input.hidden * min(n, OFFLOADED_INPUTS)))
        return at_loss, last + recomputed, before + recomputed, in_first
    total = sum((each * count for each, count in saved), SavedActivations())
    if group > 1:
        in_last_groups = total + layer_input * (most_inputs - n) + recomputed
        return total + layer_input * (inputs - n), in_last_groups, in_last_groups, in_first
    # Any kind of layer may be the last: subtract the smallest, so that no peak is underestimated.
    smallest = min((each for each, _ in saved), key=lambda each: each.total)
    before = total - smallest if n > 1 else total
    return total, total + recomputed, before + recomputed, in_first


def _largest(saved: Iterable[SavedActivations]) -> SavedActivations:
    return max(saved, key=lambda each: each.total)


def checkpoint_bytes(c: CostContext) -> int:
    """Return the bytes of all layers' checkpoints, wherever they are stored."""
    if c.job.memory.checkpointing == "none":
        return 0
    each = ((checkpoint_per_token(layer, c).total, count) for layer, count in c.model.layer_kinds)
    recomputed = c.job.recomputed_inputs(len(c.model.layers)) * stream_bytes(c) // c.hidden_shards
    return sum(c.tokens * saved * count for saved, count in each) - c.tokens * recomputed
