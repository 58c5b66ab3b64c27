"""Hugging Face's Trainer on long sequences: the plain script with two more lines, marked with <--.

torchrun --nproc-per-node 4 examples/trainer.py [--model NAME_OR_PATH] [--context 8192] [--steps 20]
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, Trainer, TrainingArguments

import longspan


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ulysses", type=int, default=4)
    parser.add_argument("--out", default="runs/trainer")
    options = parser.parse_args()

    torch.manual_seed(0)
    if options.model:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    else:
        tokenizer = ByT5Tokenizer()
        config = AutoConfig.from_pretrained(Path(__file__).with_name("llama-tiny.json"))
        model = AutoModelForCausalLM.from_config(config)
    args = TrainingArguments(
        options.out, max_steps=options.steps, per_device_train_batch_size=1, learning_rate=1e-3, logging_steps=1,
        save_strategy="no", report_to="none", use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=options.ulysses))  # <-- which rank holds which tokens
    trainer = longspan.trainer(Trainer)(model, args, train_dataset=Text(tokenizer, options.context), sp=sp)  # <--
    trainer.train()
    trainer.save_model()
    if sp.group is not None:
        torch.distributed.destroy_process_group()


class Text(torch.utils.data.Dataset):
    """Sequences of the English text that comes with Python."""

    def __init__(self, tokenizer, context):
        from pydoc_data.topics import topics

        self.ids = tokenizer("\n".join(topics.values()), return_tensors="pt").input_ids[0]
        self.context = context

    def __len__(self):
        return len(self.ids) // self.context

    def __getitem__(self, at):
        ids = self.ids[at * self.context : (at + 1) * self.context]
        return {"input_ids": ids, "labels": ids}


if __name__ == "__main__":
    main()
