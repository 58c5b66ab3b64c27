"""Time what new users do first, command by command, with a tiny model.

    python -m benchmarks.first_use

Run it in a fresh clone with the Python of a new environment, into which `pip install torch ".[train,peft]"` has
installed the package, to see that it brings all that is needed. Two CPU ranks share each sequence. A step that fails
ends the script with its output.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import command, environment, table, write_report

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
ANSWER = """
import torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained({folder!r}, dtype=torch.float32)
tokenizer = transformers.AutoTokenizer.from_pretrained({folder!r})
ids = tokenizer.apply_chat_template([{{"role": "user", "content": "What is the 3?"}}], add_generation_prompt=True,
                                    return_tensors="pt", return_dict=True)
out = model.generate(**ids, max_new_tokens=24, do_sample=False)
print(tokenizer.decode(out[0, ids["input_ids"].shape[1]:]).partition("<|im_end|>")[0])
"""
UNTUNED = "No."
"""What the model for the chats answers before it is tuned."""


class Way:
    """Runs the commands of a way in a folder, and adds up their seconds."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seconds, self.commands = folder, 0.0, list[str]()

    def run(self, line: str, *more: str, shown: str | None = None) -> str:
        """Run a command line (and further arguments); return its output."""
        program, *rest = shlex.split(line)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        start = time.perf_counter()
        done = subprocess.run(
            [str(BIN / program), *rest, *more], cwd=self.folder, env=env, capture_output=True, text=True, check=False
        )
        self.seconds += time.perf_counter() - start
        self.commands.append(shown or line)
        if done.returncode:
            sys.exit(f"{line} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        return done.stdout


def script_with_trainer(way: Way) -> str:
    """A training script with transformers' Trainer."""
    script = ROOT / "examples" / "trainer.py"
    printed = way.run(
        f"torchrun --nproc-per-node 2 {script} --ulysses 2 --context 1024 --steps 6 --out trained",
        shown="torchrun --nproc-per-node 2 examples/trainer.py --ulysses 2 --context 1024 --steps 6",
    )
    losses = [float(x) for x in re.findall(r"'loss': '?([\d.]+)", printed)]
    assert (way.folder / "trained" / "model.safetensors").exists() and losses[-1] < losses[0]
    return f"loss {losses[0]:.2f} to {losses[-1]:.2f}"


def chats(way: Way) -> str:
    """Chats from a YAML file: LoRA, evaluation, export, and an answer by plain transformers."""
    write_chats(way.folder)
    shutil.copy(ROOT / "examples" / "lora.yaml", way.folder)
    printed = way.run(
        "longspan train sft --config lora.yaml --model_name_or_path model --dataset_name chats.jsonl "
        "--eval_datasets held-out.jsonl --eval_steps 20 --save_steps 20 --context 256 --max_steps 60 "
        "--gradient_accumulation_steps 2 --learning_rate 1e-2 --ulysses 2 --bf16 false --warmup_steps 2 "
        "--output_dir tuned"
    )
    losses = [float(x) for x in re.findall(r"eval_held-out(?:_loss': '| \d+ +loss )([\d.]+)", printed)]
    assert losses and losses[-1] < losses[0], printed
    before, after = (
        way.run("python -c", ANSWER.format(folder=folder), shown=f"AutoModelForCausalLM.from_pretrained({folder!r})")
        for folder in ("model", "tuned")
    )
    assert UNTUNED in before and "It is the one" in after, (before, after)
    return f'evaluation loss {losses[0]:.2f} to {losses[-1]:.2f}; answer "{before.strip()}" to "{after.strip()}"'


def resumed_on_another_mesh(way: Way) -> str:
    """Pre-training, resumed on another mesh."""
    config = ROOT / "examples" / "llama-tiny.json"
    base = (
        f"longspan train sft --model_name_or_path {config} --dataset_name pydoc --context 1024 --packing --bf16 false "
        f"--per_device_train_batch_size 1 --lr_scheduler_type constant --logging_steps 1 --save_steps 4"
    )
    shown = base.replace(str(config), "examples/llama-tiny.json")
    way.run(f"{base} --ulysses 2 --max_steps 4 --output_dir run", shown=f"{shown} --ulysses 2 --max_steps 4")
    printed = way.run(f"{base} --ring 2 --max_steps 8 --output_dir run", shown=f"{shown} --ring 2 --max_steps 8")
    assert "resuming from" in printed and (way.folder / "run" / "checkpoint-8").exists()
    return "resumed after step 4 with a ring instead of Ulysses"


def plan(way: Way) -> str:
    """A plan, and the command that it prints."""
    config = ROOT / "examples" / "llama-tiny.json"
    printed = way.run(
        f"longspan plan --model {config} --gpu cpu --gpus 2 --context 1k --out plan.yaml",
        shown="longspan plan --model examples/llama-tiny.json --gpu cpu --gpus 2 --context 1k --out plan.yaml",
    )
    (line,) = re.findall(r"^run: (longspan train .*)$", printed, re.MULTILINE)
    way.run(line.replace("DATA", "pydoc") + " --max_steps 2 --output_dir planned", shown=line)
    return "the printed command trains"


def book(way: Way) -> str:
    """A question about a book, which two ranks read."""
    way.run(f"python {ROOT / 'examples' / 'ask.py'} --out ask", shown="python examples/ask.py --out ask")
    printed = way.run('longspan generate --model ask/hf --file ask/book.txt --question "Who lives in Oslo?" --ring 2')
    line = next(x for x in (way.folder / "ask" / "book.txt").read_text().splitlines() if "Oslo" in x)
    expected = line.split("? ")[1].split(".")[0]
    assert expected in printed, printed
    return f'"{expected}", as the book says'


def write_chats(folder: Path) -> None:
    """Write a small model that answers every chat by `UNTUNED`, and other chats to train and to evaluate on."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.train.chats import GENERATION, chat, make_tokenizer, write_rows

    tokenizer = make_tokenizer(GENERATION)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=384, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=1024, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(150):
        known = [{**turn, **({"content": UNTUNED} if turn["role"] == "assistant" else {})} for turn in chat(step % 64)]
        batch = tokenizer.apply_chat_template(known, return_tensors="pt", return_dict=True)
        model(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_rows(folder / "chats.jsonl", [{"messages": chat(n)} for n in range(64)])
    write_rows(folder / "held-out.jsonl", [{"messages": chat(n)} for n in range(64, 72)])


WAYS: tuple[Callable[[Way], str], ...] = (script_with_trainer, chats, resumed_on_another_mesh, plan, book)


def main(only: str = "") -> None:
    """Run all workflows, or the one called `only`."""
    env = environment(("longspan", "torch", "transformers", "peft"))
    rows, data = list[list[str]](), list[dict[str, Any]]()
    for walk in WAYS:
        if only and walk.__name__ != only:
            continue
        with tempfile.TemporaryDirectory(prefix="longspan-first-use-") as folder:
            way = Way(Path(folder))
            found = walk(way)
        title = (walk.__doc__ or "").rstrip(".")
        print(f"{title}: {way.seconds:.0f} s; {found}", flush=True)
        rows.append([title, str(len(way.commands)), f"{way.seconds:.0f}", found])
        data.append({"way": title, "commands": way.commands, "seconds": way.seconds, "found": found})
    commands = "\n\n".join(f"{row['way']}:\n\n```bash\n" + "\n".join(row["commands"]) + "\n```" for row in data)
    body = f"{table(['way', 'commands', 'seconds', 'result'], rows)}\n\n{commands}"
    if not only:
        write_report("first-use", "What new users do first", env, body, data)


if __name__ == "__main__":
    command(main, __doc__)
