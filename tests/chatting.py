"""Chats, and a small fast tokenizer with a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

GENERATION = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ (message['content'] or '') + '<|im_end|>\n' }}{% endgeneration %}{% else %}"
    "{{ (message['content'] or '') + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The same text as `CHATML`, with marks on what the assistant generates."""


def make_tokenizer(template: str | None = CHATML, *, merges: int = 40) -> Any:
    """Return a byte-level BPE tokenizer of fewer than 384 ids, trained on a sentence."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(special) + merges, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(["the answer to the question is that the other is the one"] * 9, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = template
    return tokenizer


def chat(number: int = 0, turns: int = 2) -> list[dict[str, str]]:
    """Return a chat of a system prompt and some turns, whose text depends on the number."""
    messages = [{"role": "system", "content": f"Answer the question {number}."}]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"What is the {number + turn}?" + " The other." * (number % 5)})
        messages.append({"role": "assistant", "content": f"It is the one, {number * turn}" + " and that" * turn})
    return messages


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as .jsonl."""
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n")
    return path
