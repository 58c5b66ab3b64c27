"""Fine-tuning on chats by `longspan train` next to TRL's SFTTrainer on one process: the losses of every step.

    python -m benchmarks.sft_vs_trl

A small Llama with random weights, chats of several turns, a loss on the assistant's tokens (`assistant_only_loss`), a
chat in each row, AdamW with clipping, fp32. longspan trains on 2 ranks that share each sequence (Ulysses and a ring).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import command, environment, table, write_report
from tests.chats import GENERATION, chat, make_tokenizer, write_rows

OPTIMIZER = {"lr": 3e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "clip": 1.0}


def write_inputs(folder: Path, chats: int) -> tuple[Path, Path]:
    """Write a model with its tokenizer, and chats of 1 to 4 turns; return their paths."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer(GENERATION)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=384, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [{"messages": chat(number, turns=number % 4 + 1)} for number in range(chats)]
    return folder / "model", write_rows(folder / "chats.jsonl", rows)


def trl_losses(model: Path, data: Path, steps: int, batch: int, context: int) -> list[float]:
    """Return the loss of each step of TRL's SFTTrainer on this process."""
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found: list[float] = []

    class Recording(trl.SFTTrainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **options: Any) -> Any:
            out = super().compute_loss(*args, **options)
            found.append((out[0] if isinstance(out, tuple) else out).item())  # its log has four digits
            return out

    beta1, beta2 = OPTIMIZER["betas"]  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        options = trl.SFTConfig(
            folder, max_steps=steps, per_device_train_batch_size=batch, learning_rate=OPTIMIZER["lr"],
            lr_scheduler_type="constant", weight_decay=OPTIMIZER["weight_decay"], adam_beta1=beta1, adam_beta2=beta2,
            max_grad_norm=OPTIMIZER["clip"], max_length=context, assistant_only_loss=True, packing=False, use_cpu=True,
            train_sampling_strategy="sequential", bf16=False, report_to="none",
            save_strategy="no", disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        trainer = Recording(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            args=options,
            train_dataset=Dataset.from_list([json.loads(line) for line in data.read_text().splitlines()]),
            processing_class=AutoTokenizer.from_pretrained(model),
        )
        trainer.train()
    return found


def flags(model: Path, data: Path, steps: int, batch: int, context: int) -> dict[str, Any]:
    """Return the flags of `longspan train` for the same training."""
    return {
        "model": str(model), "data": str(data), "steps": steps, "batch": batch, "context": context, "pack": "none",
        "shuffle": 0, "schedule": "constant", "dtype": "fp32", "log_every": 1, "save_every": 0, "export": "never",
        "micro_batch": batch // 2, **OPTIMIZER,
    }  # fmt: skip


def longspan_losses(out: Path, given: dict[str, Any]) -> list[float]:
    """Return the loss of each step of `longspan train`."""
    args = ["longspan", "train", "--out", str(out)]
    for name, value in given.items():
        values = value if isinstance(value, tuple) else (value,)
        args += [f"--{name.replace('_', '-')}", *map(str, values)]
    start = [sys.executable, "-c", "import sys; from longspan.cli import main; sys.exit(main(sys.argv[1:]))"]
    subprocess.run([*start, *args[1:]], check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def main(steps: int = 20, batch: int = 4, context: int = 512, name: str = "sft-vs-trl") -> None:
    """Train `steps` steps each way, and write a report.

    Args:
        steps: optimizer steps.
        batch: chats per step.
        context: longest chat in tokens.
        name: name of the report.
    """
    env = environment(("longspan", "torch", "transformers", "trl", "datasets"))
    with tempfile.TemporaryDirectory() as found:
        folder = Path(found)
        model, data = write_inputs(folder, steps * batch)
        os.environ["HF_HUB_OFFLINE"] = "1"
        trl = trl_losses(model, data, steps, batch, context)
        given = flags(model, data, steps, batch, context)
        ours = {axis: longspan_losses(folder / axis, {**given, axis: 2, "nproc": 2}) for axis in ("ulysses", "ring")}
    rows = [
        [str(step + 1), f"{loss:.6f}", *(f"{losses[step] - loss:+.1e}" for losses in ours.values())]
        for step, loss in enumerate(trl)
    ]
    worst = {axis: max(abs(a - b) for a, b in zip(losses, trl, strict=True)) for axis, losses in ours.items()}
    body = (
        "Loss of each step on the same chats. Goal: at most 2e-4 apart. Worst: "
        + ", ".join(f"{axis} 2: {value:.1e}" for axis, value in worst.items())
        + ".\n\n"
        + table(["step", "TRL, one process", *(f"{axis} 2, minus TRL" for axis in ours)], rows)
    )
    data_of = {"trl": trl, **ours, "worst": worst}
    write_report(name, "Fine-tuning on chats: longspan train and TRL's SFTTrainer", env, body, data_of)
    if max(worst.values()) > 2e-4:
        raise SystemExit("the losses differ by more than 2e-4")


if __name__ == "__main__":
    command(main, __doc__)
