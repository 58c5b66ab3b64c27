"""Draw docs/pictures/*.svg: who holds which tokens, heads, states and weights before, between and after each method.

    python docs/draw_methods.py [--out docs/pictures]

Token positions come from `longspan.core.layout`, masks from `longspan.Mask`, and memory from the planner, so that a
picture changes when the code does. A colour, and a digit, is a rank. Colours of text and grounds follow the reader's
light or dark scheme; the site puts the pictures into its pages and has the same classes in docs/site.css.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import longspan
from longspan.core.experts import ExpertLayout
from longspan.core.layout import Layout, choose_layout
from longspan.core.memory import LONGEST, Memory
from longspan.elastic.scheduler import SampleCosts, make_schedule
from longspan.mixers.fragments import fragment_table
from longspan.plan import Job, cost, read_hardware, read_model

RANKS = 4
TOKENS = 8  # token runs that a picture shows
HEADS = 4
WIDTH = 760
CELL = 22
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7"]  # Okabe and Ito: distinct for colour-blind readers
INK = ["#fff", "#1b1b1b", "#fff", "#1b1b1b"]  # readable on them
EVERY = -1  # on every rank
STYLE = (
    ".t{fill:#1f2328}.m{fill:#59636e}.n{fill:#eceff2}.e{fill:#c3c9d0}.l{stroke:#59636e}"
    "@media(prefers-color-scheme:dark){.t{fill:#e6edf3}.m{fill:#9da7b1}.n{fill:#23282f}.e{fill:#4b535d}.l{stroke:#9da7b1}}"
)
Cells = Sequence[Sequence[int | None]]
"""The rank in each cell: None is empty, `EVERY` is every rank."""


class Picture:
    """An SVG in the making."""

    def __init__(self, height: float) -> None:
        self.height, self.parts = height, list[str]()

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height:g}" font-size="12" '
            f'font-family="system-ui,sans-serif">'
        )
        marker = (
            '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto">'
            '<path class="m" d="M0 0L8 4L0 8z"/></marker></defs>'
        )
        return "\n".join([head, f"<style>{STYLE}</style>{marker}", *self.parts, "</svg>\n"])

    def text(self, x: float, y: float, text: str, kind: str = "t", anchor: str = "middle", size: float = 12,
             bold: bool = False) -> None:  # fmt: skip
        weight = ' font-weight="600"' if bold else ""
        colour = f'class="{kind}"' if len(kind) == 1 else f'fill="{kind}"'
        where = f'x="{x:g}" y="{y:g}"' + ("" if anchor == "start" else f' text-anchor="{anchor}"')
        self.parts.append(f'<text {where} font-size="{size:g}"{weight} {colour}>{escape(text, quote=False)}</text>')

    def box(self, x: float, y: float, width: float, height: float, rank: int | None, label: str = "",
            size: float = 11) -> None:  # fmt: skip
        where = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self.parts.append(f'<rect {where} rx="2" {_fill(rank)}/>')
        if label:
            ink = "m" if rank is None else "t" if rank < 0 else INK[rank]
            self.text(x + width / 2, y + height / 2 + size * 0.36, label, ink, size=size)

    def frame(self, x: float, y: float, width: float, height: float) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" fill="none" class="l" '
            f'stroke-opacity=".45"/>'
        )

    def arrow(self, x0: float, y0: float, x1: float, y1: float, *lines: str) -> None:
        self.parts.append(
            f'<path d="M{x0:g} {y0:g}L{x1:g} {y1:g}" fill="none" class="l" stroke-width="1.5" marker-end="url(#a)"/>'
        )
        for number, line in enumerate(reversed(lines)):
            self.text((x0 + x1) / 2, min(y0, y1) - 8 - 13 * number, line, "m", size=11)

    def curve(self, path: str) -> None:
        self.parts.append(f'<path d="{path}" fill="none" class="l" stroke-width="1.5" marker-end="url(#a)"/>')

    def grid(self, x: float, y: float, cells: Cells, title: str, across: str = "", down: str = "",
             labels: Sequence[Sequence[str]] | None = None, cell: float = CELL,
             tall: float = 0) -> tuple[float, float]:  # fmt: skip
        """Draw cells below their title; return their right edge and middle. `labels` replace the ranks' digits."""
        tall = tall or cell
        width, height = len(cells[0]) * cell, len(cells) * tall
        if title:
            self.text(x + width / 2, y - 9, title, bold=True)
        boxes: dict[int | None, str] = {}
        texts: dict[int | None, str] = {}
        for i, row in enumerate(cells):
            for j, rank in enumerate(row):
                left, top = x + j * cell, y + i * tall
                boxes[rank] = f"{boxes.get(rank, '')}M{left:g} {top:g}h{cell - 1.5:g}v{tall - 1.5:g}h{1.5 - cell:g}z"
                label = labels[i][j] if labels else "" if rank is None or rank < 0 else str(rank)
                if label:
                    at = f'x="{left + cell / 2 - 0.75:g}" y="{top + tall / 2 + 3.2:g}"'
                    texts[rank] = f"{texts.get(rank, '')}<text {at}>{label}</text>"
        self.parts += [f'<path d="{path}" {_fill(rank)}/>' for rank, path in boxes.items()]
        self.parts += [
            f'<g font-size="11" text-anchor="middle" fill="{INK[rank or 0]}">{group}</g>'
            for rank, group in texts.items()
        ]
        if across:
            self.text(x + width / 2, y + height + 14, across, "m", size=11)
        if down:
            self.parts.append(
                f'<text transform="translate({x - 7:g} {y + height / 2:g})rotate(-90)" text-anchor="middle" '
                f'font-size="11" class="m">{down}</text>'
            )
        return x + width, y + height / 2

    def panels(self, y: float, *panels: tuple[Cells, str, str, str] | str, cell: float = CELL) -> None:
        """Draw grids (cells, title, across, down) from left to right; a text between two is the message of an arrow."""
        grids = [panel for panel in panels if not isinstance(panel, str)]
        taken = sum(len(cells[0]) * cell for cells, *_ in grids)
        gap = (WIDTH - 34 - taken) / max(1, len(grids) - 1)
        x, at = 24.0, 0
        for number, panel in enumerate(panels):
            if isinstance(panel, str):
                continue
            right, middle = self.grid(x, y, *panel, cell=cell)
            message = panels[number + 1] if number + 1 < len(panels) else ""
            if isinstance(message, str) and message:
                self.arrow(right + 8, middle, right + gap - 26, middle, *message.split("|"))
            x, at = right + gap, at + 1

    def ranks(self, every: str = "") -> None:
        """Draw the legend at the bottom."""
        names = [f"rank {rank}" for rank in range(RANKS)] + ([every] if every else [])
        x = WIDTH / 2 - 40 * len(names)
        for rank, name in enumerate(names):
            self.box(x + 80 * rank, self.height - 18, 12, 12, rank if rank < RANKS else EVERY)
            self.text(x + 80 * rank + 18, self.height - 8, name, "m", "start", 11)


def _fill(rank: int | None) -> str:
    return 'class="n"' if rank is None else 'class="e"' if rank < 0 else f'fill="{COLOURS[rank]}"'


def by_tokens(layout: Layout, heads: int = HEADS) -> Cells:
    """Return for each head which rank holds each run of tokens."""
    run = 4  # tokens of a run, so that every layout divides them
    row: list[int | None] = [None] * TOKENS
    for rank in range(layout.size):
        for start, stop in layout.spans(TOKENS * run, rank):
            row[start // run : stop // run] = [rank] * (stop // run - start // run)
    return [row] * heads


def by_heads(tokens: int = TOKENS) -> Cells:
    return [[head] * tokens for head in range(HEADS)]


CONTIGUOUS = choose_layout("contiguous", 1, RANKS)


# --- one function for each picture


def overview() -> Picture:
    """One sequence on four GPUs, and what each computes."""
    p = Picture(300)
    p.text(WIDTH / 2, 18, "one sequence, longer than a GPU can hold", bold=True)
    wide = (WIDTH - 40) / 64
    for run in range(64):
        p.box(20 + run * wide, 28, wide - 1.2, 20, run // 16)
    card = (WIDTH - 40) / RANKS
    for rank in range(RANKS):
        x = 20 + rank * card
        p.arrow(x + card / 2 - 2, 52, x + card / 2 - 2, 74)
        p.frame(x + 4, 78, card - 12, 150)
        p.text(x + card / 2 - 2, 97, f"GPU {rank}", bold=True)
        for left, cells in ((x + 18, by_tokens(CONTIGUOUS)), (x + 102, by_heads())):
            mine = [[rank if owner == rank else None for owner in row] for row in cells]
            p.grid(left, 112, mine, "", labels=[[""] * TOKENS] * HEADS, cell=7.5, tall=17)
        p.arrow(x + 81, 145, x + 97, 145)
        p.text(x + 47, 196, "my tokens,", "m", size=11)
        p.text(x + 47, 210, "all heads", "m", size=11)
        p.text(x + 132, 196, "all tokens,", "m", size=11)
        p.text(x + 132, 210, "my heads", "m", size=11)
    p.text(
        WIDTH / 2,
        254,
        "Attention sees the whole sequence: an all-to-all swaps tokens for heads, or a ring passes keys and values on.",
    )
    p.text(WIDTH / 2, 276, "Loss, outputs and every gradient equal those of one process.", bold=True)
    return p


def ulysses() -> Picture:
    p = Picture(160)
    before = (by_tokens(CONTIGUOUS), "my tokens, all heads", "tokens", "heads")
    p.panels(28, before, "all-to-all", (by_heads(), "attention", "all tokens", "my heads"), "all-to-all", before)
    p.ranks()
    return p


def ring() -> Picture:
    p = Picture(236)
    p.text(112, 18, "K and V go round, Q stays", bold=True)
    places = [(112, 52), (190, 118), (112, 184), (34, 118)]
    for rank, (x, y) in enumerate(places):
        p.box(x - 30, y - 20, 60, 19, rank, f"Q {rank}")
        p.box(x - 30, y + 1, 60, 19, rank, f"K, V {rank}")
    for path in ("M146 62Q176 72 184 92", "M184 144Q176 168 148 178", "M78 178Q48 168 40 144", "M40 92Q48 72 76 62"):
        p.curve(path)
    steps = [[(rank - step) % RANKS for step in range(RANKS)] for rank in range(RANKS)]
    labels = [[f"KV {owner}" for owner in row] for row in steps]
    p.grid(300, 62, steps, "K, V at each step", "step 0, 1, 2, 3", "rank", labels, cell=36, tall=26)
    pairs = [[q if k <= q else None for k in range(RANKS)] for q in range(RANKS)]
    when = [[f"step {(q - k) % RANKS}" if k <= q else "" for k in range(RANKS)] for q in range(RANKS)]
    p.grid(
        540, 62, pairs, "causal blocks: who, and when", "K, V of rank 0, 1, 2, 3", "Q of rank", when, cell=48, tall=26
    )
    p.ranks()
    return p


def zigzag() -> Picture:
    """Token runs, causal pairs and work of a contiguous and a zigzag ring."""
    p = Picture(276)
    for x, name in ((24, "contiguous"), (404, "zigzag")):
        row = by_tokens(choose_layout(name, RANKS, 1), 1)
        p.grid(x, 28, row, f"{name}: tokens", cell=20)
        queries = row[0]
        pairs = [[queries[q] if k <= q else None for k in range(TOKENS)] for q in range(TOKENS)]
        blank = [[""] * TOKENS] * TOKENS
        p.grid(x, 66, pairs, "", "key tokens", "query tokens", blank, cell=20)
        work = [sum(q + 0.5 for q in range(TOKENS) if queries[q] == rank) for rank in range(RANKS)]
        p.text(x + 250, 74, "work of each rank", bold=True)
        for rank, pairs_of in enumerate(work):
            p.box(x + 190, 92 + rank * 30, pairs_of * 7.5, 22, rank)
            p.text(x + 196 + pairs_of * 7.5, 108 + rank * 30, f"{pairs_of * RANKS / sum(work):.2f}", "m", "start", 11)
    p.ranks()
    return p


def usp() -> Picture:
    layout = choose_layout("zigzag", 2, 2)
    p = Picture(164)
    owners = by_tokens(layout)
    blocks = [rank // 2 for rank in owners[0]]  # type: ignore[operator]
    between = [[2 * block + (head >= HEADS // 2) for block in blocks] for head in range(HEADS)]
    steps = [[2 * ((rank // 2 - step) % 2) + rank % 2 for step in range(2)] for rank in range(RANKS)]
    before = (owners, "my tokens, all heads", "tokens", "heads")
    cell = 17.0
    gap = (WIDTH - 40 - 3 * TOKENS * cell - 2 * 40) / 3
    right, middle = p.grid(24, 30, *before, cell=cell, tall=CELL)
    p.arrow(right + 6, middle, right + gap - 22, middle, "all-to-all", "in a node")
    x, _ = p.grid(right + gap, 30, between, "my block, my heads", "tokens", "heads", cell=cell, tall=CELL)
    p.arrow(x + 6, middle, x + gap - 22, middle, "ring,", "across")
    labels = [[f"KV {owner}" for owner in row] for row in steps]
    x, _ = p.grid(x + gap, 30, steps, "K, V", "step 0, 1", "rank", labels, cell=40, tall=CELL)
    p.arrow(x + 6, middle, x + gap - 22, middle, "all-to-all")
    p.grid(x + gap, 30, *before, cell=cell, tall=CELL)
    p.ranks()
    return p


def tensor_axis() -> Picture:
    everywhere: Cells = [[EVERY] * TOKENS] * HEADS
    p = Picture(160)
    residual = (everywhere, "residual stream", "tokens", "hidden")
    p.panels(
        28, residual, "no message", (by_heads(), "attention, MLP: my part", "tokens", "heads"), "all-reduce", residual
    )
    p.ranks("every rank")
    return p


def megatron_sp() -> Picture:
    p = Picture(160)
    residual = (by_tokens(CONTIGUOUS), "residual, norms", "my tokens", "hidden")
    inside = (by_heads(), "attention, MLP: my part", "tokens", "heads")
    p.panels(28, residual, "all-gather", inside, "reduce-|scatter", residual)
    p.ranks()
    return p


def state_passing() -> Picture:
    runs = fragment_table(CONTIGUOUS, 0, TOKENS, 1, None).runs
    earlier = [[owner if run < rank else None for run, (owner, _) in enumerate(runs)] for rank in range(RANKS)]
    p = Picture(160)
    tokens = by_tokens(CONTIGUOUS)
    x, middle = p.grid(24, 28, tokens, "my tokens, from state 0", "tokens", "heads")
    p.arrow(x + 8, middle, x + 84, middle, "all-gather", "(M, S)")
    labels = [["" if owner is None else f"S {owner}" for owner in row] for row in earlier]
    x, _ = p.grid(x + 112, 28, earlier, "states that enter", "of rank 0, 1, 2, 3", "rank", labels, cell=32, tall=CELL)
    p.arrow(x + 8, middle, x + 84, middle, "combine,", "add")
    p.grid(x + 112, 28, tokens, "output: my tokens", "tokens", "heads")
    p.ranks()
    return p


def dsp() -> Picture:
    p = Picture(206)
    frames = [[frame // 2] * TOKENS for frame in range(TOKENS)]
    patches = [[patch // 2 for patch in range(TOKENS)]] * TOKENS
    cell = 17.0
    x = 24.0
    for cells, title, message in (
        (frames, "spatial: along a frame", "all-to-all"),
        (patches, "temporal: along the frames", "all-to-all"),
        (frames, "spatial: along a frame", ""),
    ):
        right, middle = p.grid(x, 28, cells, title, "patches", "frames", cell=cell)
        if message:
            p.arrow(right + 8, middle, right + 127, middle, message)
        x = right + 151
    p.ranks()
    return p


def fsdp() -> Picture:
    p = Picture(190)
    shards: Cells = [[column // 2 for column in range(TOKENS)]] * 4
    forward = [shards[0], [EVERY] * TOKENS, [EVERY] * TOKENS, shards[0]]
    backward = [shards[0], [EVERY] * TOKENS, [EVERY] * TOKENS, shards[0]]
    names = ["layer 3", "layer 2", "layer 1", "layer 0"]
    for x, cells, title, under in (
        (62, shards, "at rest: a quarter each", ""),
        (316, forward[::-1], "forward of layer 1", "layer 2 is gathered meanwhile"),
        (570, backward, "backward of layer 2", "layer 1 is gathered meanwhile"),
    ):
        p.grid(x, 28, cells, title, under, cell=20, tall=24)
        for row, name in enumerate(names):
            p.text(x - 8, 44 + 24 * row, name, "m", "end", 11)
    p.text(650, 156, "gradients of layer 3 are summed", "m", size=11)
    p.ranks("every rank")
    return p


def experts() -> Picture:
    p = Picture(190)
    count = 8
    for x, size, title in (
        (54, RANKS, "at rest, and experts=4"),
        (306, 1, "experts=1: gather all"),
        (558, 2, "experts=2"),
    ):
        layout = ExpertLayout(count, RANKS, size)
        held = [layout.of(rank % size) for rank in range(RANKS)]
        cells = [[rank if expert in held[rank] else None for expert in range(count)] for rank in range(RANKS)]
        labels = [[str(expert) if expert in held[rank] else "" for expert in range(count)] for rank in range(RANKS)]
        under = {RANKS: "tokens go to all ranks", 1: "tokens stay", 2: "tokens go between 0 and 1, and 2 and 3"}[size]
        p.grid(x, 28, cells, title, under, labels=labels, cell=20, tall=26)
        for rank in range(RANKS):
            p.text(x - 8, 45 + 26 * rank, f"rank {rank}", "m", "end", 11)
    p.ranks()
    return p


def memory() -> Picture:
    """What one layer saves for its backward, and the planned memory of a step."""
    parts = ["layer input", "q, k, v", "attn. output", "norms", "MLP"]
    saved = {"none": "11111", "selective": "10100", "full": "10000"}
    p = Picture(262)
    p.text(228, 18, "what a layer saves, by checkpointing=", bold=True)
    for x, part in enumerate(parts):
        p.text(136 + 62 * x + 30, 36, part, "m", size=10)
    for y, (name, row) in enumerate(saved.items()):
        p.text(128, 60 + 30 * y, f'"{name}"', "t", "end", 11)
        for x, on in enumerate(row):
            p.box(136 + 62 * x, 43 + 30 * y, 60, 26, 0 if on == "1" else None, "save" if on == "1" else "recompute", 10)
    planned_bars(p)
    return p


def planned_bars(p: Picture) -> None:
    model, hardware = read_model("llama-3.1-8b"), read_hardware("h100")
    levels = {
        '"fastest"': Memory(),
        "tiled=True": Memory(tiled=True),
        'checkpointing="full"': Memory(checkpointing="full"),
        '"longest"': LONGEST,
        '"longest", offload="host"': Memory(**{**vars(LONGEST), "offload": "host"}),
    }
    items = {
        "weights, gradients, optimizer": ("weights", "gradients", "optimizer"),
        "saved for the backward": ("activations_hidden", "activations_attention", "activations_mlp"),
    }
    p.text(600, 18, "planned GB per GPU: Llama-3.1-8B,", bold=True)
    p.text(600, 33, "131,072 tokens, 8 x H100", bold=True)
    left, scale = 604, 1.3
    for y, (name, options) in enumerate(levels.items()):
        plan = cost(model, Job(context=1 << 17, memory=options).on(ulysses=8), hardware)
        sizes = [sum(plan.memory_bytes.get(key, 0) for key in keys) for keys in items.values()]
        sizes.append(plan.memory_total_bytes - sum(sizes))
        p.text(left - 6, 61 + 26 * y, name, "t", "end", 11)
        x = float(left)
        for kind, size in enumerate(sizes):
            p.box(x, 47 + 26 * y, max(0.5, size / 1e9 * scale - 0.8), 20, kind if kind < 2 else EVERY)
            x += size / 1e9 * scale
        p.text(x + 4, 61 + 26 * y, f"{plan.memory_total_bytes / 1e9:.0f}", "m", "start", 11)
    limit = left + hardware.memory_bytes / 1e9 * scale
    p.parts.append(f'<path d="M{limit:g} 42V178" stroke="#D55E00" stroke-width="1.5"/>')
    p.text(limit, 192, "80 GB", "#D55E00", size=11)
    for number, name in enumerate([*items, "the rest"]):
        p.box(466, 202 + 18 * number, 12, 12, number if number < 2 else EVERY)
        p.text(484, 212 + 18 * number, name, "m", "start", 11)


def masks() -> Picture:
    """The pairs of each mask, one colour for each region."""
    import torch

    from longspan.attn.segments import document_segments

    n = 16
    documents = document_segments(torch.tensor([[0] * 5 + [1] * 8 + [2] * 3]))
    shown = {
        "causal": longspan.Mask(),
        "window=4": longspan.Mask(window=4),
        "chunk_size=4": longspan.Mask(chunk_size=4),
        "documents": longspan.Mask(segments=documents),
        "prefix=5": longspan.Mask(prefix=5),
    }
    p = Picture(188)
    for panel, (name, mask) in enumerate(shown.items()):
        pairs: list[list[int | None]] = [[None] * n for _ in range(n)]
        for number, region in enumerate(mask.regions(0, n, n)):
            for q in range(region.q0, region.q1):
                for k in range(region.k0, region.k1):
                    low, high = region.lo, region.hi
                    if (low is None or q - k >= low) and (high is None or q - k <= high):
                        pairs[q][k] = number % RANKS
        blank = [[""] * n] * n
        p.grid(24 + 148 * panel, 28, pairs, name, "key tokens", "" if panel else "query tokens", blank, cell=8.6)
    return p


def shared_prefixes() -> Picture:
    """Three answers to a prompt as rows, as a tree in one row, and who sees whom there."""
    import torch

    prompt, answers = 5, (3, 4, 3)
    pack = longspan.pack_tree([list(range(prompt))] * 3, [[10 * (i + 1)] * size for i, size in enumerate(answers)])
    words = [[str(i) for i in range(prompt)] + ["abc"[row]] * size for row, size in enumerate(answers)]
    p = Picture(238)
    wide = prompt + max(answers)
    rows = [[0] * prompt + [row + 1] * size + [None] * (wide - prompt - size) for row, size in enumerate(answers)]
    p.grid(24, 58, rows, "three sequences: 25 tokens", "", "", [row + [""] * (wide - len(row)) for row in words], 20)
    n = pack["input_ids"].numel()
    of_token, label = [0] * n, [""] * n
    for row, path in enumerate(pack.paths):
        for at, token in enumerate(path.tolist()):
            of_token[token], label[token] = (0, words[row][at]) if at < prompt - 1 else (row + 1, words[row][at])
    order = torch.arange(n)
    seen = longspan.TreeMask(pack["tin"], pack["tout"]).dense(1, 1, order, order)[0, 0]
    p.grid(24, 168, [of_token], f"one row: {n} tokens", "4 is copied for each answer: it predicts a, b and c", "",
           [label], 20)  # fmt: skip
    colours = [[of_token[k] if seen[q, k] else None for k in range(n)] for q in range(n)]
    p.grid(470, 30, colours, "each token sees its path", "key tokens", "query tokens", [[""] * n] * n, 10.6)
    return p


def elastic() -> Picture:
    lengths = [32_000, 16_000, 8_000, 7_800, 4_000, 3_900, 2_000, 1_900]
    costs = SampleCosts(read_model("llama-3.1-8b"), Job(context=1).on(ulysses=RANKS), read_hardware("h100"))
    schedule = make_schedule(lengths, costs, 16_000)
    names = [f"{n / 1000:g}k" for n in lengths]
    p = Picture(206)
    every: Cells = [[rank] * len(lengths) for rank in range(RANKS)]
    p.grid(62, 34, every, "fixed mesh", "a round for each sample, all-to-alls in all", labels=[names] * RANKS, cell=36,
           tall=28)  # fmt: skip
    groups = [schedule.groups_of(rank) for rank in range(RANKS)]
    labels = [["" if g is None else ", ".join(names[i] for i in g.samples) for g in row] for row in groups]
    cells: Cells = [[None if g is None else rank for g in row] for rank, row in enumerate(groups)]
    under = f"{len(schedule.rounds)} rounds; equal labels share samples"
    p.grid(470, 34, cells, "elastic", under, labels=labels, cell=260 / len(schedule.rounds), tall=28)
    for x in (54, 462):
        for rank in range(RANKS):
            p.text(x, 52 + 28 * rank, f"rank {rank}", "m", "end", 11)
    p.ranks()
    return p


PICTURES: list[Callable[[], Picture]] = [
    overview, ulysses, ring, zigzag, usp, tensor_axis, megatron_sp, state_passing, dsp, fsdp, experts, memory,
    masks, shared_prefixes, elastic
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "pictures")
    args = parser.parse_args()
    args.out.mkdir(exist_ok=True)
    for draw in PICTURES:
        (args.out / f"{draw.__name__.replace('_', '-')}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
