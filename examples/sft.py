"""TRL's SFTTrainer on long sequences: the plain script with two more lines, marked with <--.

pip install ".[train]"
torchrun --nproc-per-node 4 examples/sft.py [--model NAME_OR_PATH] [--data chats.jsonl] [--context 8192] [--steps 20]
"""

import argparse
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer
from trl import SFTConfig, SFTTrainer

import longspan


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--data")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ulysses", type=int, default=4)
    parser.add_argument("--out", default="runs/sft")
    options = parser.parse_args()

    torch.manual_seed(0)
    if options.model:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    else:
        tokenizer = ByT5Tokenizer()
        config = AutoConfig.from_pretrained(Path(__file__).with_name("llama-tiny.json"))
        model = AutoModelForCausalLM.from_config(config)
    data = load_dataset("json", data_files=options.data, split="train") if options.data else questions()
    args = SFTConfig(
        options.out, max_steps=options.steps, max_length=options.context, packing=True, per_device_train_batch_size=1,
        learning_rate=1e-3, logging_steps=1, save_strategy="no", report_to="none", bf16=False,
        use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=options.ulysses))  # <-- which rank holds which tokens
    trainer = longspan.trainer(SFTTrainer)(model, args, train_dataset=data, processing_class=tokenizer, sp=sp)  # <--
    trainer.train()
    trainer.save_model()
    if sp.group is not None:
        torch.distributed.destroy_process_group()


def questions():
    """Return prompts and completions from the documentation that comes with Python."""
    from pydoc_data.topics import topics

    return Dataset.from_list([
        {"prompt": f"What does Python's reference say about {name}?\n", "completion": text}
        for name, text in topics.items()
    ])  # fmt: skip


if __name__ == "__main__":
    main()
