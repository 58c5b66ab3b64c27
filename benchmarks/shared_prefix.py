"""A policy's step on several completions of one prompt: packed as a tree, and as separate sequences.

    python -m benchmarks.shared_prefix

A step is GRPO's loss of the completions' log-probabilities (`longspan.token_logprobs`) and its backward, on one process
with one thread. `tree` is one row of `longspan.pack_tree`; `batch` is a row for each completion, as trainers compute
it; `one by one` accumulates gradients over the rows. Errors are against transformers on separate sequences in fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import longspan
from benchmarks import common

MIB = 2**20
CONFIG: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 4096, "max_position_embeddings": 8192, "attn_implementation": "sdpa",
}  # fmt: skip


class Step:
    """One way to compute the step."""

    def __init__(self, way: str, prompt: list[int], completions: list[list[int]]) -> None:
        torch.manual_seed(0)
        self.way, self.prompt, self.ids, self.tokens = way, len(prompt), torch.tensor(completions), len(completions[0])
        self.rows = torch.tensor([prompt + ids for ids in completions])
        self.model: Any = LlamaForCausalLM(LlamaConfig(**CONFIG))
        if way != "transformers, fp64":
            sp = longspan.SequenceSharding(longspan.init_mesh())
            self.model = longspan.parallelize(self.model.train(), sp, fsdp=False)
        else:
            self.model = self.model.double()
        self.advantages = torch.linspace(-1, 1, len(completions))[:, None]
        self.pack = longspan.pack_tree([prompt] * len(completions), completions)

    def logps(self, rows: Tensor) -> Tensor:
        if self.way == "transformers, fp64":
            logits = self.model(input_ids=rows).logits[:, self.prompt - 1 : -1].log_softmax(-1)
            return logits.gather(-1, rows[:, self.prompt :, None])[..., 0]
        labels = rows.clone()
        labels[:, : self.prompt] = -100
        found: Tensor = longspan.token_logprobs(self.model, {"input_ids": rows, "labels": labels}, gather=True)
        return found[:, self.prompt - 1 : -1]

    def __call__(self) -> Tensor:
        """Compute loss and gradients; return the log-probabilities."""
        self.model.zero_grad(set_to_none=True)
        if self.way == "tree":
            found = longspan.token_logprobs(self.model, self.pack, gather=True)
            return self.backward(self.pack.completions(found), slice(None))
        if self.way == "batch":
            return self.backward(self.logps(self.rows), slice(None))
        every = [slice(i, i + 1) for i in range(len(self.rows))]
        return torch.cat([self.backward(self.logps(self.rows[row]), row) for row in every])

    def backward(self, logps: Tensor, rows: slice) -> Tensor:
        ratio = (logps - logps.detach()).exp()
        loss = -(ratio * self.advantages[rows]).sum() / self.ids.numel()
        loss.backward()
        return logps.detach()


def errors(step: Step, exact: tuple[Tensor, dict[str, Tensor]]) -> tuple[float, float]:
    """Return the errors of log-probabilities and of the worst gradient, relative to their norms."""
    logps, (of_logps, of_grads) = step(), exact
    grads = {name: p.grad for name, p in step.model.named_parameters()}
    apart = {name: float((grads[name] - g).norm() / g.norm()) for name, g in of_grads.items()}
    return float((logps - of_logps).norm() / of_logps.norm()), max(apart.values())


def main(
    prompt: int = 4000, completion: int = 500, completions: int = 8, rounds: int = 3, name: str = "shared-prefix"
) -> None:
    """Time and measure each way."""
    torch.set_num_threads(1)
    env = common.environment(["torch", "transformers"])
    g = torch.Generator().manual_seed(0)
    vocab = CONFIG["vocab_size"]
    start = torch.randint(vocab, (prompt,), generator=g).tolist()
    answers = torch.randint(vocab, (completions, completion), generator=g).tolist()
    truth = Step("transformers, fp64", start, answers)
    logps = truth()
    exact = logps, {name: p.grad for name, p in truth.model.named_parameters()}
    ways = {way: Step(way, start, answers) for way in ("tree", "batch", "one by one")}
    found = {way: errors(step, exact) for way, step in ways.items()}
    peaks: dict[str, float] = {}
    for way, step in ways.items():
        run: Callable[[], object] = step
        step.model.zero_grad(set_to_none=True)
        peaks[way] = common.memory_rise(run) / MIB
    wall, cpu = common.alternate(dict(ways), rounds, warmup=0)
    rows, data = [], []
    for way, step in ways.items():
        tokens = step.pack["input_ids"].numel() if way == "tree" else step.rows.numel()
        row = {"way": way, "tokens": tokens, "seconds": common.median(wall[way]), "cpu": common.median(cpu[way])}
        row |= {"time": common.paired_ratio(cpu[way], cpu["batch"]), "peak": peaks[way]}
        row |= {"memory": peaks[way] / peaks["batch"]}
        row |= {"of_one": common.paired_ratio(cpu[way], cpu["one by one"]), "errors": found[way]}
        data.append({**row, "every": [wall[way], cpu[way]]})
        rows.append([
            way, f"{tokens:,}", f"{row['seconds']:.1f}", f"{row['cpu']:.1f}", f"{row['time']:.3f}",
            f"{row['of_one']:.3f}", f"{row['peak']:.0f}", f"{row['memory']:.3f}",
            *(f"{error:.1e}" for error in found[way]),
        ])  # fmt: skip
    header = [
        "way", "tokens", "s", "CPU s", "CPU time / batch", "CPU time / one by one", "tensor peak MiB",
        "tensor peak / batch", "error of log-probabilities", "worst gradient's error",
    ]  # fmt: skip
    text = common.table(header, rows) + (
        f"\n\n{completions} completions of {completion} tokens of one prompt of {prompt:,}; forward and backward, "
        f"fp32; a Llama of {CONFIG['num_hidden_layers']} layers with hidden size {CONFIG['hidden_size']}. Goals: CPU "
        f"time and memory at most 0.4 of the batch's. Errors are relative norms, against separate sequences in fp64."
    )
    common.write_report(name, "Completions of one prompt: a tree, and separate sequences", env, text, data)


if __name__ == "__main__":
    common.command(main, __doc__)
