"""A tokenizer of words and a processor of small images, with chat templates."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tests.pictures import IMAGE

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
