"""Train a small video transformer on clips of a moving square, sharded over its frames and patches; then sample one.

    torchrun --nproc-per-node 4 examples/video.py --ulysses 4

Marked lines are longspan's. Every rank makes the same noise, loss and sampler steps, because all have one seed.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler, LatteTransformer3DModel
from torch import Tensor

import longspan

FRAMES, SIZE, TEXT = 8, 16, 4
RIGHT, DOWN = 0, 1


def make_clips(rows: int) -> tuple[Tensor, Tensor]:
    """Return clips `[rows, 1, frames, size, size]` of a square that moves right or down, and their direction."""
    start, direction = torch.randint(0, SIZE - 4 - FRAMES, (rows, 2)), torch.randint(0, 2, (rows,))
    clips = -torch.ones(rows, 1, FRAMES, SIZE, SIZE)
    for row, ((x, y), way) in enumerate(zip(start.tolist(), direction.tolist(), strict=True)):
        for t in range(FRAMES):
            top, left = y + t * (way == DOWN), x + t * (way == RIGHT)
            clips[row, 0, t, top : top + 4, left : left + 4] = 1
    return clips, direction


def as_text(direction: Tensor) -> Tensor:
    """Return the conditions `[rows, tokens, channels]`: one constant for each direction."""
    return 4 * F.one_hot(direction, 8).float()[:, None].expand(-1, TEXT, -1)


def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("--ulysses", type=int, default=1)
    flags.add_argument("--steps", type=int, default=800)
    flags.add_argument("--batch", type=int, default=16)
    args = flags.parse_args()

    sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=args.ulysses))  # <-- before anything else
    torch.manual_seed(0)
    model = LatteTransformer3DModel(
        num_attention_heads=4, attention_head_dim=16, in_channels=1, num_layers=2, sample_size=SIZE, patch_size=4,
        cross_attention_dim=64, caption_channels=8, norm_type="ada_norm_single", num_embeds_ada_norm=1000,
        norm_elementwise_affine=False, activation_fn="gelu-approximate", video_length=FRAMES,
    )  # fmt: skip
    model = longspan.parallelize(model.to(sp.device), sp)  # <-- tokens over the ranks, and weights by FSDP2
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    for step in range(1, args.steps + 1):
        clips, direction = make_clips(args.batch)
        noise, sigma = torch.randn_like(clips), torch.rand(args.batch).sqrt()  # more of the noisy ones
        mixed = torch.lerp(clips, noise, sigma.view(-1, 1, 1, 1, 1))
        inputs = [x.to(sp.device) for x in (mixed, sigma * 1000, as_text(direction), noise - clips)]
        velocity = model(*inputs[:3]).sample  # whole, on every rank
        loss = F.mse_loss(velocity, inputs[3])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if sp.rank == 0 and (step <= 2 or step % 50 == 0):
            print(f"step {step} loss {loss.item():.6f}", flush=True)

    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(20)
    video = torch.randn(2, 1, FRAMES, SIZE, SIZE, device=sp.device)
    text = as_text(torch.tensor([RIGHT, DOWN])).to(sp.device)
    with torch.no_grad():
        for time in scheduler.timesteps:
            velocity = model(video, time.expand(2).to(sp.device), text).sample
            video = scheduler.step(velocity, time, video).prev_sample
    if sp.rank == 0:
        for name, moved in zip(("right", "down"), centers(video), strict=True):
            print(f"asked to move {name}: moved {moved[0]:.4f} to the right, {moved[1]:.4f} down")
    if sp.group is not None:
        torch.distributed.destroy_process_group()


def centers(video: Tensor) -> list[tuple[float, float]]:
    """Return how far the bright area's center moves, to the right and down, from the first to the last frame."""
    light = video[:, 0].clamp(0, 1)
    at = torch.arange(SIZE, device=video.device)
    total = light.sum((2, 3)).clamp_min(1e-6)
    x, y = ((light.sum(dim) * at).sum(-1) / total for dim in (2, 3))
    return [(float(a[-1] - a[0]), float(b[-1] - b[0])) for a, b in zip(x, y, strict=True)]


if __name__ == "__main__":
    main()
