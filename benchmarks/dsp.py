"""Latte's blocks by Dynamic Sequence Parallelism and by Ulysses, forward and backward, on loopback and on slow links.

    python -m benchmarks.dsp             # as root for the slow links (`benchmarks/cluster.py`)
    python -m benchmarks.dsp --no-slow   # loopback alone

Frames are sharded at the start. DSP switches to the patches and back by one all-to-all each. Ulysses keeps the frames
sharded, computes spatial attention locally too, and exchanges q, k, v and the output in each temporal block. Megatron
SP, by its formula, gathers and scatters all tokens around every attention and MLP. "No messages" is the computation of
a rank alone, so the rest of a method's time is its messages. Goal: DSP at most 0.6 of Ulysses' time where links
dominate, that is where messages take at least half of Ulysses' time.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import longspan
from benchmarks import cluster, common
from longspan.attn.methods.dsp import DynamicSharding
from longspan.comm.collectives import all_gather
from longspan.comm.reshard import gather_along, shard_sizes
from longspan.diffusion import attention
from longspan.diffusion.structure import Attention
from longspan.diffusion.tokens import Sizes, Tokens
from tests.counting import count_sent

GOAL = 0.6
METHODS = ("DSP", "Ulysses")
COMPUTATION = "no messages"
HEADS, DIM, PAIRS, TEXT = 8, 16, 4, 32
RATES = (None, "200mbit", "50mbit", "20mbit")
FRAMES, PATCHES = 1, 2
"""Dimensions of `x_BTSC`."""
Shape = tuple[int, int]  # frames, patches
SHAPES: tuple[Shape, ...] = ((16, 256), (18, 225))  # the second does not divide


def main(ranks: int = 4, repeats: int = 5, slow: bool = True, name: str = "dsp-vs-ulysses") -> None:
    """Measure both methods at each rate of links, each rank on its own host."""
    env = common.environment(["longspan", "torch", "diffusers"])
    env["ranks"] = f"{ranks}, gloo, one thread each: over loopback, then each in a network namespace (tc tbf)"
    rows = []
    for rate in RATES if slow else (None,):
        for shape in SHAPES if rate is None else SHAPES[:1]:
            row = {"ranks": ranks, "rate": rate, "frames": shape[0], "patches": shape[1]}
            arguments = {"frames": shape[0], "patches": shape[1], "repeats": repeats}
            if rate is None:
                found = common.run_ranks(measure, ranks, *arguments.values())
            else:
                with cluster.hosts(ranks, rate) as net:
                    found = cluster.run_on(net, measure, **arguments)
            rows.append({**row, **found})
    common.write_report(name, "Dynamic Sequence Parallelism against Ulysses", env, describe(rows), rows)


def measure(frames: int, patches: int, repeats: int) -> dict[str, Any]:
    """Return bytes and times of both methods; run by every rank."""
    warnings.simplefilter("ignore")
    sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=dist.get_world_size(), device_type="cpu"))
    steps = {method: Step(method, sp, frames, patches) for method in (*METHODS, COMPUTATION)}
    sent, found = {}, {}
    for method in METHODS:
        step = steps[method]
        with count_sent() as log:
            mine = step()
        found[method] = step.whole(mine)
        sent[method] = common.most_sent(log).get("all_to_all", 0)
    for i, (a, b) in enumerate(zip(*found.values(), strict=True)):
        if (error := common.relative_error(a, b)) > 1e-4:
            raise RuntimeError(f"tensor {i} of the methods differs by {error:.1e}")
    wall, cpu = common.alternate(dict(steps), repeats)
    return {"sent": sent, "formula": formulas(frames, patches, sp.size), "wall": wall, "cpu": cpu}


class Step:
    """One method's blocks; calling it runs forward and backward, and returns output and gradients of all ranks."""

    def __init__(self, method: str, sp: longspan.SequenceSharding, frames: int, patches: int) -> None:
        from diffusers import LatteTransformer3DModel

        torch.manual_seed(0)
        self.method = method
        self.model: Any = LatteTransformer3DModel(
            num_attention_heads=HEADS, attention_head_dim=DIM, in_channels=4, num_layers=PAIRS, sample_size=8,
            cross_attention_dim=HEADS * DIM, patch_size=2, norm_type="ada_norm_single", caption_channels=8,
            num_embeds_ada_norm=1000, norm_elementwise_affine=False, activation_fn="gelu-approximate",
        )  # fmt: skip
        pairs = zip(self.model.transformer_blocks, self.model.temporal_transformer_blocks, strict=True)
        self.blocks = [block for pair in pairs for block in pair]
        channels, sizes = HEADS * DIM, {FRAMES: frames, PATCHES: patches}
        self.attends = (PATCHES, FRAMES) * PAIRS
        self.shards = longspan.dsp(sp, self.attends, sizes)
        if method == "Ulysses":
            self.shards = DynamicSharding(sp, sizes, (FRAMES,) * len(self.blocks))
            tokens = Tokens(sp)
            tokens.sizes = Sizes((frames,))  # one stream of tokens
            for i, block in enumerate(self.model.temporal_transformer_blocks):
                attention.bind(block.attn1, f"block {i}", [Attention((0,), (0,))], tokens)
        self.x_BTSC, grad = torch.randn(1, frames, patches, channels), torch.randn(1, frames, patches, channels)
        self.grad = self.shards.shard(grad, -1)
        self.text, self.time = torch.randn(1, TEXT, channels), torch.randn(1, 6 * channels)

    def __call__(self) -> list[Tensor]:
        x_BTSC = mine = self.shards.shard(self.x_BTSC).clone().requires_grad_()
        text = self.text.repeat_interleave(x_BTSC.shape[FRAMES], 0)
        for i, (block, dim) in enumerate(zip(self.blocks, self.attends, strict=True)):
            x_BTSC = self._held(x_BTSC, i)
            x = x_BTSC if dim == PATCHES else x_BTSC.transpose(FRAMES, PATCHES)
            time = self.time.repeat_interleave(x.shape[1], 0)
            out = block(x.flatten(0, 1), None, text if dim == PATCHES else None, None, time, None, None)
            out = out.unflatten(0, x.shape[:2])
            x_BTSC = out if dim == PATCHES else out.transpose(FRAMES, PATCHES)
        weights = [p for block in self.blocks for p in block.parameters()]
        return [x_BTSC.detach(), *torch.autograd.grad(x_BTSC, [mine, *weights], self.grad)]

    def _held(self, x_BTSC: Tensor, block: int) -> Tensor:
        """Return the hidden states as a block needs them, or in the computation alone a tensor of that shape."""
        if self.method != COMPUTATION:
            return self.shards.switch(x_BTSC, block)
        sp, sizes, sharded = self.shards.sp, dict(self.shards.sizes), self.shards.dims[block]
        sizes[sharded] = shard_sizes(sizes[sharded], sp.size)[sp.rank]
        entries = x_BTSC.flatten(1, 2)
        missing = sizes[FRAMES] * sizes[PATCHES] - entries.shape[1]  # negative if they are too many
        return F.pad(entries, (0, 0, 0, missing)).unflatten(1, (sizes[FRAMES], sizes[PATCHES]))

    def whole(self, found: list[Tensor]) -> list[Tensor]:
        """Return output and gradients of all ranks."""
        sp, (last, first) = self.shards.sp, (self.shards.dims[-1], self.shards.dims[0])
        output, grad, *of_weights = found
        for x in of_weights:
            dist.all_reduce(x)
        sharded = [(output, last), (grad, first)]
        return [
            *(gather_along(x, dim, self.shards.sizes[dim], sp.group, all_gather) for x, dim in sharded),
            *of_weights,
        ]


def formulas(frames: int, patches: int, ranks: int) -> dict[str, int]:
    """Return the fp32 bytes that the rank with most sends, forward and backward."""
    t, s, h = (shard_sizes(n, ranks) for n in (frames, patches, HEADS))
    there_and_back = max(t[r] * (patches - s[r]) + s[r] * (frames - t[r]) for r in range(ranks)) * HEADS * DIM
    of_heads = max(t[r] * (HEADS - h[r]) + (frames - t[r]) * h[r] for r in range(ranks)) * patches * DIM
    return {
        "DSP": 4 * (2 * PAIRS - 1) * there_and_back,
        "Ulysses": 4 * PAIRS * 4 * of_heads,
        "Megatron SP": 4 * 2 * PAIRS * 2 * 4 * frames * patches * HEADS * DIM * (ranks - 1) // ranks,
    }


def describe(rows: list[dict[str, Any]]) -> str:
    cells, judged = [], []
    for row in rows:
        links, wall = row["rate"] or "loopback", row["wall"]
        computation = common.median(wall[COMPUTATION])
        share = 1 - common.paired_ratio(wall[COMPUTATION], wall["Ulysses"])
        ratio = common.paired_ratio(wall["DSP"], wall["Ulysses"])
        if row["frames"] == SHAPES[0][0]:
            judged.append(f"- {links}: messages take {share:.2f} of Ulysses' time; DSP takes {ratio:.3f} of it")
            judged[-1] += f" (goal: {GOAL})." if share >= 0.5 else "; links do not dominate."
        for method in (*METHODS, COMPUTATION, "Megatron SP"):
            line = [links, f"{row['frames']} x {row['patches']}", method]
            if method in wall:
                seconds, cpu = (common.median(row[clock][method]) for clock in ("wall", "cpu"))
                line += [f"{seconds:.3f}", f"{seconds - computation:.3f}", f"{cpu:.3f}"]
                line += [f"{common.paired_ratio(wall[method], wall['Ulysses']):.3f}"]
            line += [""] * (7 - len(line))
            formula, sent = row["formula"].get(method), row["sent"].get(method)
            line += ["" if sent is None else f"{sent:,}", "" if formula is None else f"{formula:,}"]
            cells.append([*line[:-1], "="] if sent is not None and sent == formula else line)
    columns = ["seconds", "messages s", "CPU s", "of Ulysses", "bytes sent", "formula"]
    return "\n".join(
        [
            common.table(["links", "frames x patches", "method", *columns], cells),
            "",
            *judged,
            f"- {PAIRS} spatial and {PAIRS} temporal blocks of Latte, {HEADS} heads of {DIM}, batch 1, fp32;",
            "  outputs and all gradients of the methods are equal within 1e-4.",
            "- seconds: of the slowest rank, medians over rounds; messages s: without those of the computation alone;",
            "  CPU s: the sum over ranks; of Ulysses: the median over rounds of the ratio in a round.",
            "- bytes sent: of the rank that sends most, both passes; `=` where the formula agrees to the byte.",
            "  Megatron SP is a formula alone: an all-gather and a reduce-scatter around each attention and MLP.",
        ]
    )


if __name__ == "__main__":
    common.command(main, __doc__)
