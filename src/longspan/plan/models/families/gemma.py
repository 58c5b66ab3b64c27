"""Gemma 2 and 3: windows between full layers, four norms a layer."""

from __future__ import annotations

from functools import partial

from longspan.plan.models.family import Family
from longspan.plan.models.mixers import dense, full_at_intervals, sliding_first, softmax
from longspan.plan.models.weights import attention, gated_mlp

_ORDER = (
    "attention",
    "mlp",
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)

FAMILIES = {
    "gemma2": Family(
        softmax(attention),
        dense(gated_mlp),
        {
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 4096,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
        types=sliding_first,
        listed=True,
        order=_ORDER,
    ),
    "gemma3": Family(
        softmax(partial(attention, qk_norm="head")),
        dense(gated_mlp),
        {
            # The published configs of 4B to 27B leave some of these sizes out.
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262208,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
        types=partial(full_at_intervals, "sliding_window_pattern", "sliding_attention"),
        listed=True,
        order=_ORDER,
    ),
}
