"""Chats with their templates, tokenizers of words and of bytes, and a processor of small images."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch

from tests.hf.pictures import IMAGE

WORDS = ["the", "sea", "was", "calm", "and", "a", "ship", "came", "slowly", "home", "with", "its", "sails", "down"]
CHAT = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<a>{% generation %}{{ m['content'] }}<e>"
    "{% endgeneration %}"
    "{% else %}<u>{{ m['content'] }}<e>{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
PICTURE_CHAT = (
    "{% for m in messages %}{{ '<a>' if m['role'] == 'assistant' else '<u>' }}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% elif m['role'] == 'assistant' %}{% generation %}{{ part['text'] }}<e>"
    "{% endgeneration %}{% else %}{{ part['text'] }}<e>{% endif %}{% endfor %}{% endfor %}"
)

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


@functools.cache
def tokenizer() -> Any:
    """Words as tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<e>", "<u>", "<a>", "<unk>", "<image>"]
    vocab = {word: at for at, word in enumerate(special + WORDS)} | {"<image>": IMAGE}
    made = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(special)
    found = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<e>", unk_token="<unk>")
    found.chat_template = CHAT
    return found


@functools.cache
def processor() -> Any:
    """Images of 16 x 16 pixels become 16 tokens."""
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    size = {"height": 16, "width": 16}
    images = CLIPImageProcessorPil(size=size, crop_size=size)
    made = LlavaProcessor(images, tokenizer(), patch_size=4, vision_feature_select_strategy="default",
                          num_additional_image_tokens=1)  # fmt: skip
    made.chat_template = PICTURE_CHAT
    return made


def image(at: int) -> Any:
    """Random pixels."""
    from PIL import Image

    pixels = torch.randint(256, (16, 16, 3), generator=torch.Generator().manual_seed(at), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


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
