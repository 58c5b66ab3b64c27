"""Teach a small vision-language model to watch videos of moving shapes, in less memory than one rank needs; then ask it
about a longer video, which one rank cannot hold either.

    torchrun --nproc-per-node 4 examples/moving_shapes.py --ulysses 4 --out shapes
    torchrun --nproc-per-node 1 examples/moving_shapes.py                 # out of memory in the first steps
    torchrun --nproc-per-node 1 examples/moving_shapes.py --model shapes  # out of memory in the long video
    torchrun --nproc-per-node 4 examples/moving_shapes.py --ulysses 4 --model shapes

A disc, a square and a cross move across the picture, at different times, amid specks of all colours. Questions: which
colour has the disc? Which colour comes first? Marked lines are longspan's.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

import longspan
import longspan.checkpoint

SIZE, PATCH, LIFE, STEP = 24, 4, 2, 3  # pixels of a side; of a patch's; a shape is seen in LIFE units of two frames
GRID = SIZE // PATCH
QUESTIONS = 6  # which colour has the disc, the square, the cross? Which one crosses first, second, last?
COLOUR, QUESTION, VIDEO, IMAGE, START, END = 1, 7, 13, 14, 15, 16  # ids of tokens, or the first of a kind

at = torch.arange(8) - 3.5
MASKS = torch.stack([
    at[:, None] ** 2 + at**2 < 14,
    torch.ones(8, 8, dtype=torch.bool),
    (at[:, None].abs() - at.abs()).abs() < 1,
])  # fmt: skip


def make_video(units: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return frames `[2 * units, 3, SIZE, SIZE]`, each pixel 0 or 1, and the answers to all questions."""
    frames = torch.zeros(2 * units, 3, SIZE, SIZE, dtype=torch.uint8)
    for frame in frames:  # specks
        (x, y), colour = torch.randint(0, SIZE - 1, (2,), generator=draw), torch.randint(1, 7, (), generator=draw)
        frame[:, y : y + 2, x : x + 2] = bits(colour)
    times = torch.randperm(units // LIFE, generator=draw)[: len(MASKS)] * LIFE * 2
    colours = COLOUR + torch.randperm(6, generator=draw)[: len(MASKS)]
    free = SIZE - 8 - STEP * (2 * LIFE - 1)
    for mask, first, colour in zip(MASKS, times.tolist(), colours, strict=True):
        across, along, way = (int(torch.randint(0, n, (), generator=draw)) for n in (SIZE - 7, free + 1, 4))
        for t in range(2 * LIFE):
            ahead = along + STEP * t if way % 2 else SIZE - 8 - along - STEP * t
            x, y = (ahead, across) if way < 2 else (across, ahead)
            frames[first + t, :, y : y + 8, x : x + 8] = bits(colour) * mask
    return frames, torch.cat([colours, colours[times.argsort()]])


def bits(colour: Tensor) -> Tensor:
    """Return a colour's red, green and blue, `[3, 1, 1]`."""
    return ((colour >> torch.arange(3)) & 1).to(torch.uint8).view(3, 1, 1)


def as_patches(frames: Tensor) -> Tensor:
    """Return patches as Qwen's processors order them, `[units * GRID**2, pixels of a patch]`."""
    x = frames.view(-1, 2, 3, GRID // 2, 2, PATCH, GRID // 2, 2, PATCH)
    return x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, 3 * 2 * PATCH**2)


def ask(videos: list[Tensor], questions: Tensor) -> dict[str, Tensor]:
    """Return a batch: each row has a video, then its row of `questions`, `[rows, tokens]`."""
    units = len(videos[0]) // 2
    unit = torch.tensor([START, *[VIDEO] * (GRID // 2) ** 2, END])
    ids = torch.cat([unit.repeat(len(videos), units), questions], 1)
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == VIDEO) * 2,
        "pixel_values_videos": torch.cat([as_patches(video) for video in videos]),
        "video_grid_thw": torch.tensor([[units, GRID, GRID]] * len(videos)),
    }


def lesson(rows: int, units: int, draw: torch.Generator) -> dict[str, Tensor]:
    """Return a batch with a question about each shape, in any order, and its answer."""
    made = [make_video(units, draw) for _ in range(rows)]
    orders = [torch.randperm(len(answers), generator=draw) for _, answers in made]
    talk = torch.stack(
        [
            torch.stack([order + QUESTION, answers[order]], 1).flatten()
            for order, (_, answers) in zip(orders, made, strict=True)
        ]
    )
    batch = ask([frames for frames, _ in made], talk)
    labels = torch.full_like(batch["input_ids"], -100)
    labels[:, -talk.shape[1] :] = talk.masked_fill(talk >= QUESTION, -100)
    return batch | {"labels": labels}


def answers(model, batch: dict[str, Tensor], **options) -> Tensor:
    """Return the token that the model says after each row's question."""
    options |= {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0}
    return model.eval().generate(**batch, **options)[:, -1].cpu()  # <-- the same call as without longspan


def accuracy(model, draw: torch.Generator, device: torch.device) -> float:
    """Return the share of right answers about 24 new videos: one question about each."""
    videos, truth = zip(*[make_video(12, draw) for _ in range(24)], strict=True)
    asked = torch.arange(len(videos)) % QUESTIONS
    found = answers(model, to(device, ask(list(videos), asked[:, None] + QUESTION)))
    return float((found == torch.stack(truth)[torch.arange(len(videos)), asked]).float().mean())


def to(device: torch.device, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: x.to(device) for key, x in batch.items()}


@contextlib.contextmanager
def limit(mib: int, what: str, sp: longspan.SequenceSharding) -> Iterator[None]:
    """Let this process allocate `mib` MiB more than it has now; 0: no limit. End it with a message if it needs more."""
    held = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    most = int(held.split()[1]) * 1024 + mib * 2**20 if mib else resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "allocate memory" not in str(error):
            raise
        print(f"{what}: rank {sp.rank} of {sp.size} is out of memory ({mib} MiB)", flush=True)
        os._exit(1)  # torchrun ends the others
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def train(model, sp: longspan.SequenceSharding, steps: int, mib: int, say: Callable[[str], None]) -> None:
    """Train on videos of 18 to 72 frames, after two small steps in which libraries allocate what they keep."""
    draw, start = torch.Generator().manual_seed(0), time.perf_counter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 50, (steps - step) / 100))

    def learn(rows: int, units: int) -> float:
        loss = model.train()(**to(sp.device, lesson(rows, units, draw))).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        return loss.item()

    for _ in range(2):
        learn(4, 3 * LIFE)
    with limit(mib, "training", sp):
        for step in range(3, steps + 1):
            loss = learn(16, LIFE * int(torch.randint(3, 13, (), generator=draw)))
            if step <= 4 or step % 50 == 0:
                say(f"step {step} loss {loss:.6f}, {time.perf_counter() - start:.0f} s")


def watch(model, sp: longspan.SequenceSharding, units: int, draw: torch.Generator) -> tuple[Tensor, list[int]]:
    """Read a long video into a cache and ask every question; return which answers are right, and the answers."""
    frames, truth = make_video(units, draw)
    batch = to(sp.device, ask([frames], torch.tensor([[QUESTION]])))
    del frames
    tokens, found = batch["input_ids"].shape[1], []
    cache = longspan.ShardedCache(model, room=tokens)  # <-- each rank holds a part
    for question in range(QUESTIONS):
        batch["input_ids"][0, -1] = QUESTION + question
        found.append(int(answers(model, batch, past_key_values=cache, prefill_chunk_size=1024)))
        cache.crop(tokens - 1)  # back to the end of the video
    return torch.tensor(found) == truth, found


def new_model() -> Qwen3VLForConditionalGeneration:
    common = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 64**-0.5}
    rope = {"rope_type": "default", "rope_theta": 1e8, "mrope_section": [16, 8, 8]}  # most of a head turns slowly
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(
        text_config={
            **common, "vocab_size": END + 1, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
            "head_dim": 64, "max_position_embeddings": 2**20, "rope_parameters": rope, "pad_token_id": 0,
        },
        vision_config={
            **common, "depth": 2, "num_heads": 2, "patch_size": PATCH, "temporal_patch_size": 2, "out_hidden_size": 64,
            "num_position_embeddings": GRID**2, "deepstack_visual_indexes": [0],
        },
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END,
    ))  # fmt: skip


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--ulysses", type=int, default=1)
    flags.add_argument("--steps", type=int, default=400)
    flags.add_argument("--out", type=Path, help="folder for the trained model")
    flags.add_argument("--model", type=Path, help="such a folder: train no more")
    flags.add_argument("--frames", type=int, nargs="*", default=[250], help="of the long videos")
    flags.add_argument("--videos", type=int, default=8, help="of each length")
    flags.add_argument("--train-mib", type=int, default=224, help="what a rank may allocate to train; 0: no limit")
    flags.add_argument("--mib", type=int, default=16, help="what a rank may allocate for a long video; 0: no limit")
    args = flags.parse_args()

    sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=args.ulysses))  # <-- before anything else
    torch.manual_seed(0)
    model = new_model() if args.model is None else Qwen3VLForConditionalGeneration.from_pretrained(args.model)
    config = copy.deepcopy(model.config)
    model = longspan.parallelize(model.to(sp.device), sp, fsdp=False)  # <-- tokens and frames over the ranks

    def say(text: str) -> None:
        if sp.rank == 0:
            print(text, flush=True)

    if args.model is None:
        say(f"before: {accuracy(model, torch.Generator().manual_seed(1), sp.device):.2f} of answers right")
        train(model, sp, args.steps, args.train_mib, say)
        say(f"after: {accuracy(model, torch.Generator().manual_seed(1), sp.device):.2f} of answers right")
        if args.out is not None:
            longspan.checkpoint.export(args.out, model, config, None, torch.float32)

    watch(model, sp, 24, torch.Generator().manual_seed(0))  # so that libraries have allocated what they keep
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    for frames in args.frames:
        with limit(args.mib, f"{frames:,} frames", sp):
            draw = torch.Generator().manual_seed(frames)
            right, found = zip(*[watch(model, sp, frames // 2, draw) for _ in range(args.videos)], strict=True)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024 - peak
        colours, order = torch.stack(right).float().view(-1, 2, len(MASKS)).mean((0, 2)).tolist()
        said = f"{colours:.2f} of answers about colours right, {order:.2f} of those about the order: {found[0]}, ..."
        say(f"{frames:,} frames on {sp.size} rank(s), peak +{grown} MiB: {said}")
    if sp.group is not None:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
