"""GRPO's loss (arXiv:2402.03300) over a sharded sequence, on completions from elsewhere, in your own loop.

    torchrun --nproc-per-node 4 examples/grpo.py [--model NAME_OR_PATH] [--context 2048] [--steps 8] [--shared-prefixes]

`longspan.token_logprobs(gather=True)` returns the log-probabilities of all tokens on every rank, without logits, so the
loss reads as on one process. With --shared-prefixes a prompt is computed once for all its completions. Without --model,
a small Llama starts from random weights. The completions are passages of the text that comes with Python; the reward
counts how few of their letters are capitals.
"""

import argparse
import copy
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer

import longspan


def grpo_loss(model, reference, batch, old, advantages, items, *, clip=0.2, beta=0.04, entropy_bonus=0.0, shared=False):
    """Return the loss of a step, equal on every rank of a sequence group.

    Args:
        model: the policy, parallelized.
        reference: the model that it should stay close to, parallelized.
        batch: `input_ids`, `attention_mask`, and `labels` that are -100 outside of completions, [rows, n].
        old: log-probabilities of the policy that generated the completions, [rows, n]; None: of `model` itself.
        advantages: [rows].
        items: label tokens of a replica's rows, the mean of all replicas; the sum is divided by them.
        shared: compute what rows begin alike with, their prompt, once.
    """
    logps, entropy = longspan.token_logprobs(model, batch, entropy=True, gather=True, shared_prefixes=shared)
    with torch.no_grad():
        near = longspan.token_logprobs(reference, batch, gather=True, shared_prefixes=shared)
    scored = torch.zeros_like(logps)
    scored[:, :-1] = batch["labels"][:, 1:] != -100  # entry i is for token i + 1
    ratio = (logps - (logps.detach() if old is None else old)).exp()
    gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(1 - clip, 1 + clip) * advantages[:, None])
    kl = (near - logps).exp() - (near - logps) - 1
    return ((beta * kl - gain - entropy_bonus * entropy) * scored).sum() / items


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--ulysses", type=int, default=4)
    parser.add_argument("--shared-prefixes", action="store_true")
    args = parser.parse_args()
    shared = args.shared_prefixes

    sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=args.ulysses))

    torch.manual_seed(0)
    if args.model:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    else:
        tokenizer = ByT5Tokenizer()
        config = AutoConfig.from_pretrained(Path(__file__).with_name("llama-tiny.json"))
        model = AutoModelForCausalLM.from_config(config)
    reference = longspan.parallelize(copy.deepcopy(model).to(sp.device).eval(), sp)
    model = longspan.parallelize(model.to(sp.device).train(), sp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    for step, (batch, rewards) in zip(range(args.steps), groups(tokenizer, args.context), strict=False):
        batch = {name: x.to(sp.device) for name, x in batch.items()}
        advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).to(sp.device)
        with torch.no_grad():
            old = longspan.token_logprobs(model, batch, gather=True, shared_prefixes=shared)
        items = (batch["labels"][:, 1:] != -100).sum()
        for _ in range(2):  # two updates with the same completions
            loss = grpo_loss(model, reference, batch, old, advantages, items, entropy_bonus=0.01, shared=shared)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if sp.rank == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}, reward {rewards.mean().item():.4f}", flush=True)

    if sp.group is not None:
        torch.distributed.destroy_process_group()


def groups(tokenizer, context, completions=4):
    """Yield, for each prompt, a batch of completions and their rewards. Replace it by what your policy generates."""
    from pydoc_data.topics import topics

    for name, text in topics.items():
        prompt = tokenizer(f"What does Python's reference say about {name}?\n", add_special_tokens=False).input_ids
        passages = [text[len(text) * at // completions :][: context - len(prompt)] for at in range(completions)]
        rows = [tokenizer(passage, add_special_tokens=False).input_ids for passage in passages]
        rows = [(prompt + row)[:context] for row in rows]
        n = max(len(row) for row in rows)
        ids = torch.tensor([row + [0] * (n - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (n - len(row)) for row in rows])
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, : len(prompt)] = -100
        rewards = torch.tensor([-sum(c.isupper() for c in passage) / len(passage) for passage in passages])
        yield {"input_ids": ids, "attention_mask": mask, "labels": labels}, rewards


if __name__ == "__main__":
    main()
