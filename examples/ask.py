"""Write a book, and a model that answers questions about it, to runs/ask: `python examples/ask.py`, in seconds.

    longspan generate --model runs/ask/hf --file runs/ask/book.txt --question "Who lives in Oslo?" --ring 2 --ulysses 2

The model is a Llama of two layers over bytes. It is not trained: this script sets its weights so that it looks up the
question. In layer 1, each of eight heads copies one of the eight bytes before a byte. In layer 2, a head finds the byte
of the book that follows the last eight bytes of the question, and the model outputs it (an induction head: Olsson et
al. 2022, arXiv:2209.11895). It knows no language: asked about anything else, it copies the closest match.
"""

import argparse
import math
import random
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

BACK = 8  # previous bytes that layer 1 copies, one head each
CODE = 32  # numbers of a byte's code, +1 or -1
VOCABULARY = 259  # ByT5's: 3 special tokens, then the bytes
NEWLINE = ord("\n") + 3
HEAD_DIM = 384  # 64 fast rotary pairs; the 128 slow ones turn too little to matter
SHARP = 40.0  # by how much the score of the right position exceeds its neighbours'

NAMES = "Ada Boris Clara David Elena Felix Greta Hugo Ines Jonas Karin Leo Mira Nils Olga Pavel Rosa Sven Tilda Viktor"
TRADES = "baker weaver miller potter sailor tailor farmer glazier mason clockmaker"
TOWNS = "Oslo Lima Cairo Delhi Quito Paris Kyoto Accra Tunis Hanoi Riga Porto Lagos Perth Bergen Turin Malmo Dakar"
NOISE = "The road goes on past the river, and nobody asks where it ends. "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/ask"), help="folder of book.txt and hf/")
    parser.add_argument("--noise", type=int, default=2, help="sentences of noise behind each line")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "book.txt").write_text(book(args.noise))
    model = look_up()
    model.save_pretrained(args.out / "hf")
    print(f"{args.out / 'book.txt'}: {(args.out / 'book.txt').stat().st_size:,} bytes; {args.out / 'hf'}: the model")


def book(noise: int) -> str:
    draw = random.Random(0)
    names, trades = NAMES.split(), TRADES.split()
    draw.shuffle(names)  # each name once, so that the bytes written so far determine the next one
    people = [f"{name} the {draw.choice(trades)}" for name in names]
    lines = [f"Who lives in {town}? {who}.\n" for town, who in zip(TOWNS.split(), people, strict=False)]
    return "".join(line + NOISE * noise for line in lines)


@torch.no_grad()
def look_up() -> LlamaForCausalLM:
    """The model. Its residual stream: a byte's code, a 1, the codes of the bytes before it, the code of the answer."""
    hidden = CODE * (BACK + 3)  # slightly more than needed
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=CODE,
        num_hidden_layers=2,
        num_attention_heads=BACK,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=2**20,
        rope_parameters={"rope_type": "default", "rope_theta": 0.02 ** (-HEAD_DIM / 32)},  # pair 16 turns by 0.02
        rms_norm_eps=1e-9,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=NEWLINE,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    for name, p in model.named_parameters():
        p.fill_(1.0 if "norm" in name else 0.0)
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 2, (VOCABULARY, CODE), generator=draw) * 2.0 - 1
    one, answer = CODE, slice(CODE * (BACK + 1) + 1, CODE * (BACK + 2) + 1)
    before = [slice(0, CODE)]  # the byte's own code, then of the byte before it, ...
    before += [slice(CODE * i + 1, CODE * (i + 1) + 1) for i in range(1, BACK + 1)]
    model.model.embed_tokens.weight[:, :CODE] = codes
    model.model.embed_tokens.weight[:, one] = 1

    # A norm divides by the root of the mean square, which is known: that many entries are 1 or -1, the others 0.
    rms = [math.sqrt((CODE * filled + 1) / hidden) for filled in (1, BACK + 1, BACK + 2)]
    eye, root = torch.eye(CODE), HEAD_DIM**0.25  # attention divides by the root of the head's dimension
    first, second = (layer.self_attn for layer in model.model.layers)

    angles = 0.02 ** (torch.arange(16) / 16)  # radians that a rotary pair turns from one token to the next
    turn = math.sqrt(SHARP) * root * rms[0]
    for head in range(BACK):  # all keys are equal but for their rotation; queries are turned back by `head + 1`
        q, at = first.q_proj.weight[head * HEAD_DIM :], first.o_proj.weight[before[head + 1], head * HEAD_DIM :]
        q[:16, one] = turn * torch.cos(angles * (head + 1))
        q[HEAD_DIM // 2 : HEAD_DIM // 2 + 16, one] = -turn * torch.sin(angles * (head + 1))
        at[:, :CODE] = eye
    for kv in range(2):
        first.k_proj.weight[kv * HEAD_DIM : kv * HEAD_DIM + 16, one] = turn
        first.v_proj.weight[kv * HEAD_DIM : kv * HEAD_DIM + CODE, :CODE] = eye * rms[0]

    # Compare the bytes up to a query with those before a key, each byte in separate rotary pairs that hardly turn.
    slow = torch.cat([torch.arange(64, HEAD_DIM // 2), torch.arange(64, HEAD_DIM // 2) + HEAD_DIM // 2])
    match = math.sqrt(SHARP / CODE) * root * rms[1]
    for i in range(BACK):
        rows = slow[i * CODE : (i + 1) * CODE]
        second.q_proj.weight[rows, before[i]] = eye * match
        second.k_proj.weight[rows, before[i + 1]] = eye * match
    second.v_proj.weight[:CODE, :CODE] = eye * rms[1]
    second.o_proj.weight[answer, :CODE] = eye
    model.lm_head.weight[:, answer] = codes * rms[2]
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=NEWLINE, pad_token_id=0)
    return model


if __name__ == "__main__":
    main()
