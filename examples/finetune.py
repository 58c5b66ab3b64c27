"""Your own training loop with longspan: the two lines marked with <--, started by `torchrun`.

    torchrun --nproc-per-node 4 examples/finetune.py [--model NAME_OR_PATH] [--context 8192] [--steps 20]

Every rank runs this script and reads the same text; the model shards each batch. Without --model, a small Llama starts
from random weights. `longspan train` does the same, with checkpoints and metrics.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer

import longspan


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ulysses", type=int, default=4)
    args = parser.parse_args()

    sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=args.ulysses))  # <-- which rank holds which tokens

    torch.manual_seed(0)
    if args.model:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    else:
        tokenizer = ByT5Tokenizer()
        config = AutoConfig.from_pretrained(Path(__file__).with_name("llama-tiny.json"))
        model = AutoModelForCausalLM.from_config(config)
    model = longspan.parallelize(model.to(sp.device).train(), sp)  # <-- shards each batch itself
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for step, tokens in zip(range(args.steps), sequences(tokenizer, args.context), strict=False):
        tokens = tokens.to(sp.device)
        loss = model(input_ids=tokens, labels=tokens).loss  # the mean over the full sequence, equal on every rank
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if sp.rank == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)

    if sp.group is not None:
        torch.distributed.destroy_process_group()


def sequences(tokenizer, context):
    """Yield sequences [1, context] of the English text that comes with Python."""
    from pydoc_data.topics import topics

    ids = tokenizer("\n".join(topics.values()), return_tensors="pt").input_ids[0]
    for start in range(0, len(ids) - context, context):
        yield ids[None, start : start + context]


if __name__ == "__main__":
    main()
