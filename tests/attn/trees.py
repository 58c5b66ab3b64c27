"""Rollouts that share beginnings, packed and one by one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import longspan
from longspan.hf.batch.trees import TreePack
from tests.models import Run, Truth, build, check_gradients, check_loss, gradients
from tests.tolerance import excess

PROMPT = list(range(3, 17))
PROMPTS = [PROMPT] * 4 + [PROMPT[:9]] * 2 + [[40, 41]] * 2 + [[]]
COMPLETIONS = [
    [20, 21, 22, 23, 24, 25], [20, 21, 30, 31], [20, 21, 22], [50, 51, 52, 53, 54, 55, 56, 57],
    [12, 13, 14, 15, 16, 20, 21, 33, 34, 35], [28, 29], [42, 43, 44], [42, 43, 44], [7, 8, 9, 10],
]  # fmt: skip
MASKS = [[1] * len(ids) for ids in COMPLETIONS]
MASKS[4][:5] = [0, 1, 1, 0, 1]
WHOLE = [[*prompt, *completion] for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)]
"""Rollouts that branch in prompts and completions, one that another begins with, two equal ones, and a lone one."""


def pack(**options: Any) -> TreePack:
    return longspan.pack_tree(PROMPTS, COMPLETIONS, MASKS, **options)


def labels_of_rollouts() -> list[Tensor]:
    """The label that each token of each rollout predicts."""
    found = []
    for prompt, ids, mask in zip(PROMPTS, COMPLETIONS, MASKS, strict=True):
        labels = [-100] * len(prompt) + [i if trained else -100 for i, trained in zip(ids, mask, strict=True)]
        found.append(torch.tensor([*labels[1:], -100]))
    return found


def separately(model: Any) -> Run:
    """Run each rollout by itself; the loss is the mean over all trained tokens."""
    total, scored = torch.zeros(()), []
    for ids, labels in zip(WHOLE, labels_of_rollouts(), strict=True):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        total = total + F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        scored.append(logits.detach().log_softmax(-1)[labels >= 0].gather(-1, labels[labels >= 0][:, None])[:, 0])
    loss = total / sum(map(len, scored))
    loss.backward()
    return Run(float(loss.detach()), torch.cat(scored), gradients(model), None)


def of_rollouts(packed: TreePack, x: Tensor) -> Tensor:
    """Return the entries of each rollout's labelled tokens, as `separately` has them."""
    return torch.cat([x[0, path[labels >= 0]] for path, labels in zip(packed.paths, labels_of_rollouts(), strict=True)])


FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {}, "Qwen2": {}, "Qwen3Moe": {}, "GPT2": {}, "OPT": {},
    "Mistral": {"sliding_window": 5}, "Gemma2": {}, "Gemma3Text": {}, "GptOss": {}, "Llama4Text": {}, "DeepseekV3": {},
}  # fmt: skip


def compare_trees(
    family: str, sp: longspan.SequenceSharding, truth: Truth, compiled: bool = False, **options: Any
) -> None:
    model = longspan.parallelize(build(family, **FAMILIES[family]), sp, **options)
    if compiled:
        longspan.compile_layers(model, backend="aot_eager")
    packed = pack()
    out = model(**packed)
    out.loss.backward()
    check_loss(float(out.loss.detach()), truth)
    check_gradients(gradients(model), truth)
    with torch.no_grad():
        found = of_rollouts(packed, longspan.token_logprobs(model, packed, gather=True))
    assert excess(found, truth.single.logits, truth.exact.logits) <= 1
