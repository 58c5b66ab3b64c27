"""One random case: a model, a batch, a mesh, options and a job. It prints as JSON, and can be read back."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tests.fuzz import multimodal
from tests.fuzz.families import build
from tests.hf import pictures
from tests.models import rows_of

IGNORED = -100


@dataclass(frozen=True)
class Case:
    """The case that `python -m tests.fuzz --case` takes as JSON; fields left out have the defaults below.

    Attributes:
        family: one of `tests.fuzz.families.families()`.
        config: changes of its small default config.
        double: fp64 on the ranks too, instead of fp32.
        lora: PEFT adapters on every linear layer.
        seed: of weights and tokens.
        mesh: sizes of the axes.
        sharding: keywords of `SequenceSharding`.
        options: keywords of `parallelize`; `memory` may be the fields of a `longspan.Memory`.
        rows: rows of the batch, for each replica.
        length: tokens of a row.
        parts: of a vision-language model, the parts of each row of all replicas, as in `tests/hf/pictures.py`.
        padding: left, right, both, holes, or row (the last row is padding alone).
        documents: the key of the batch that marks packed documents: position_ids, document_ids, seq_idx, cu_seq_lens_q.
        positions: offset: position ids given, from 3; mask: counted over real tokens, as `generate` does.
        labels: all, few, or edge (also where the last token of left-hand padding predicts the first real one).
        embeds: `inputs_embeds` in place of ids.
        types: `token_type_ids` given.
        job: step, generate or trainer.
        steps: of an SGD optimizer.
        micro: batches per step, all but the last in `no_sync`.
        resume: save a checkpoint after the first step, and load it into a new model.
        generation: keywords of `generate`, or of TrainingArguments.
        teacher: keywords of `longspan.distillation_loss`, by which steps train against a model of other weights.
    """

    family: str
    config: dict[str, Any] = field(default_factory=dict)
    double: bool = False
    lora: bool = False
    seed: int = 0
    mesh: dict[str, int] = field(default_factory=lambda: {"ulysses": 2})
    sharding: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    rows: int = 2
    length: int = 21
    parts: list[list[Any]] = field(default_factory=list)
    padding: str = ""
    documents: str = ""
    positions: str = ""
    labels: str = "all"
    embeds: bool = False
    types: bool = False
    job: str = "step"
    steps: int = 1
    micro: int = 1
    resume: bool = False
    generation: dict[str, Any] = field(default_factory=dict)
    teacher: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        plain = Case(self.family)
        changed = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return json.dumps({k: v for k, v in changed.items() if k in ("family", "mesh") or v != getattr(plain, k)})

    @staticmethod
    def read(text: str) -> Case:
        return Case(**json.loads(text))

    @property
    def ranks(self) -> int:
        ranks = 1
        for size in self.mesh.values():
            ranks *= size
        return ranks


MESHES = {
    1: [{}],
    2: [{"ulysses": 2}, {"ring": 2}, {"tensor": 2}, {"data": 2}],
    3: [{"ulysses": 3}, {"ring": 3}],
    4: [
        {"ulysses": 4}, {"ring": 4}, {"ring": 2, "ulysses": 2}, {"data": 2, "ulysses": 2}, {"data": 2, "ring": 2},
        {"tensor": 2, "ulysses": 2}, {"tensor": 2, "ring": 2}, {"tensor": 4}, {"tensor": 2, "data": 2},
    ],
    8: [
        {"ulysses": 8}, {"ring": 8}, {"ring": 2, "ulysses": 4}, {"ring": 4, "ulysses": 2}, {"data": 4, "ulysses": 2},
        {"data": 2, "ring": 2, "ulysses": 2},
    ],
}  # fmt: skip


def drawn(rng: random.Random, family: str, mesh: dict[str, int]) -> Case:
    """Draw a case on a mesh. Most options keep their defaults, so that few cases are refused."""

    def maybe(chance: float, *values: Any) -> Any:
        return rng.choice(values) if rng.random() < chance else None

    job = rng.choices(["step", "generate", "trainer"], [10, 3, 0.7])[0]
    vision = family.startswith(("vision", "types"))
    if (family.startswith("masked") and job == "generate") or (vision and job == "trainer"):
        job = "step"
    config = {
        "num_key_value_heads": maybe(0.3, 1, 2, 4),
        "vocab_size": maybe(0.3, 61, 67),
        "tie_word_embeddings": maybe(0.3, True, False),
        "sliding_window": maybe(0.3, 3, 8, 40),
        "attention_chunk_size": maybe(0.3, 3, 8, 40),
        "output_router_logits": maybe(0.15, True),
        "attn_logit_softcapping": maybe(0.1, 1.0),
    }
    memory = maybe(0.4, "longest", "auto", {})
    if memory == {}:
        memory = {
            "checkpointing": rng.choice(["none", "selective", "full", "grouped"]),
            "tiled": maybe(0.4, True),
            "head_slices": maybe(0.4, 0),
        }
        memory = _given(memory)
    options = {
        "fsdp": maybe(0.4, False),
        "memory": memory,
        "logits": maybe(0.2, True),
        "tensor_style": maybe(0.5, "megatron-sp") if "tensor" in mesh else None,
        "kernel": maybe(0.15, "tiled", "eager"),
    }
    sharding = {
        "layout": maybe(0.3, "zigzag", "contiguous") if "ring" in mesh else None,
        "overlap_chunks": maybe(0.2, 2, 4) if "ulysses" in mesh else None,
    }
    case = Case(
        family=family, config=_given(config), double=rng.random() < 0.3, lora=rng.random() < 0.08,
        seed=rng.randrange(1000), mesh=mesh, sharding=_given(sharding), options=_given(options),
        rows=rng.choice([1, 1, 2, 3]), length=rng.choice([rng.randint(4, 12), rng.randint(13, 40)]), job=job,
    )  # fmt: skip
    if vision:
        case = replace(case, double=False)
    if family.startswith("vision"):
        parts = [_parts(rng, family.partition("/")[2]) for _ in range(case.rows * mesh.get("data", 1))]
        case = replace(case, parts=parts)
    if job == "generate":
        generation = {
            "max_new_tokens": rng.randint(1, 6),
            "num_beams": maybe(0.2, 3),
            "prefill_chunk_size": maybe(0.3, 3, 7),
            "repetition_penalty": maybe(0.2, 1.3),
        }
        return replace(case, padding=maybe(0.4, "left") or "", lora=False, generation=_given(generation))
    if job == "trainer":
        masked = family.startswith("masked")  # takes no num_items_in_batch: the plain Trainer logs the sum of the means
        args = {
            "gradient_accumulation_steps": None if masked else maybe(0.3, 2),
            "gradient_checkpointing": maybe(0.3, True),
            "max_grad_norm": maybe(0.3, 0.0),
            "save_steps": maybe(0.4, 2),
        }
        return replace(case, double=False, generation=_given(args))
    steps = rng.choice([1, 1, 1, 2, 3])
    trained = {"steps": steps, "micro": rng.choice([1, 1, 2]), "resume": steps > 1 and rng.random() < 0.4}
    if rng.random() < 0.1 and "output_router_logits" not in case.config:
        teacher = {"beta": rng.choice([0.0, 0.3, 1.0]), "temperature": maybe(0.4, 0.7), "top_k": maybe(0.4, 1, 5)}
        trained["teacher"] = _given(teacher)
    if vision:
        return replace(case, padding=rng.choice(["left", "right"]), **trained)
    documents = maybe(0.25, "position_ids", "document_ids", "seq_idx", "cu_seq_lens_q")
    if documents == "cu_seq_lens_q":  # marks the documents of one row
        case = replace(case, rows=1)
        documents = documents if "data" not in mesh else "seq_idx"
    if documents:  # if all documents have few tokens, no query and no key has a gradient
        case = replace(case, length=max(case.length, 9))
    padding = "" if documents else maybe(0.4, "left", "right", "both", "holes", "row") or ""
    return replace(
        case,
        padding=padding,
        documents=documents or "",
        positions=maybe(0.25, "offset", "mask") or "",
        labels="all" if documents else rng.choice(["all", "all", "few", "edge"]),
        embeds=rng.random() < 0.1,
        types=rng.random() < 0.15,
        **trained,
    )


def _parts(rng: random.Random, family: str) -> list[Any]:
    """Draw a row of text, and up to three pictures: some of one embedding, few much larger than the others."""
    parts: list[Any] = [rng.randint(3, 12)]
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        if family in pictures.GRIDS:
            videos = family.startswith("Glm") or rng.random() < 0.5  # GLM has one placeholder for both
            height, width = rng.choice([(2, 2), (2, 4), (4, 4), (6, 4), (8, 10)])
            parts.append(["video", rng.randint(1, 3), height, width] if videos else ["image", 1, height, width])
        else:
            parts.append(["image", 1, *rng.choice([(2, 2), (4, 4), (8, 2)] if family == "Mistral3" else [(4, 4)])])
        parts.append(rng.randint(1, 6))
    return parts


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


@dataclass
class Batch:
    """One global batch.

    Attributes:
        whole: the input of the sharded model, the rows of one replica.
        plain: the input of one process.
        real: bool [rows, length], the logits that count, of `whole`.
        documents: the borders of each row's documents, empty without any.
    """

    whole: dict[str, Any]
    plain: dict[str, Any]
    real: Tensor
    documents: list[list[int]]


def batch_of(case: Case, number: int, vocabulary: int, replica: tuple[int, int] = (0, 1)) -> Batch:
    """Return a batch, the same in every process; `replica` is the number of one, and how many there are."""
    kind, _, name = case.family.partition("/")
    if kind == "types":
        model = build(case.family, case.config, case.seed)
        side, seed = case.padding or ("right" if "minimax_m3" in name else "left"), case.seed + 1000 * number
        plain, whole = (multimodal.batch(model, part, side=side, seed=seed) for part in ((0, 1), replica))
        return Batch(whole, plain, whole["attention_mask"].bool(), [])
    if kind == "vision":
        return _batch_of_pictures(case, name, case.seed + 1000 * number, replica)
    rng = random.Random(f"{case.seed} {number}")
    g = torch.Generator().manual_seed(case.seed + 1000 * number)
    n, rows = case.length, case.rows * case.mesh.get("data", 1)
    ids = torch.randint(3, vocabulary, (rows, n), generator=g)
    real = torch.ones(rows, n, dtype=torch.bool)
    for row in range(rows):
        left, right = (rng.randrange(n // 2) if case.padding in (side, "both") else 0 for side in ("left", "right"))
        real[row, :left], real[row, n - right :] = False, False
        if case.padding == "holes" and n > 4:
            real[row, rng.randrange(1, n - 1)] = False
    if case.padding == "row" and rows > 1:
        real[-1] = False
    ids = ids * real
    later = range(n // 2, n)
    documents = [sorted({0, n, *rng.sample(later, min(3, len(later)))}) for _ in range(rows)] if case.documents else []
    labels = ids.masked_fill(~real, IGNORED)
    if case.labels == "few":
        labels[torch.rand(rows, n, generator=g) < 0.7] = IGNORED
    if case.labels != "edge":
        labels[:, 1:].masked_fill_(~real[:, :-1], IGNORED)
    for row, borders in enumerate(documents):
        labels[row, borders[:-1]] = IGNORED
    labels[0, -1 if real[0, -1] else int(real[0].nonzero()[-1])] = 5  # at least one label
    plain: dict[str, Any] = {"input_ids": ids, "labels": labels}
    if case.padding:
        plain["attention_mask"] = real.long()
    if case.types:
        plain["token_type_ids"] = (torch.arange(n) > n // 3).long().expand(rows, -1).contiguous()
    if documents:
        sizes = [[b - a for a, b in itertools.pairwise(borders)] for borders in documents]
        plain["position_ids"] = torch.stack([torch.cat([torch.arange(s) for s in row]) for row in sizes])
    elif case.positions == "offset":
        plain["position_ids"] = torch.arange(3, n + 3).expand(rows, -1).contiguous()
    elif case.positions == "mask":
        plain["position_ids"] = (real.cumsum(-1) - 1).clamp(min=0)
    whole = dict(plain)
    if case.documents in ("document_ids", "seq_idx"):
        whole[case.documents] = torch.stack([torch.arange(len(s)).repeat_interleave(torch.tensor(s)) for s in sizes])
    elif case.documents == "cu_seq_lens_q":
        whole["cu_seq_lens_q"] = whole["cu_seq_lens_k"] = torch.tensor(documents[0], dtype=torch.int32)
    return Batch(rows_of(whole, *replica), plain, real.chunk(replica[1])[replica[0]], documents)


def _batch_of_pictures(case: Case, name: str, seed: int, replica: tuple[int, int]) -> Batch:
    rows = tuple(tuple(x if isinstance(x, int) else tuple(x) for x in row) for row in case.parts)
    rows = rows or pictures.rows_for(name)  # type: ignore[assignment]
    number, replicas = replica
    mine = range(len(rows))[number * len(rows) // replicas : (number + 1) * len(rows) // replicas]
    plain, whole = (
        pictures.batch(name, rows, side=case.padding or "left", keep=keep, seed=seed) for keep in (None, mine)
    )
    real = whole.get("attention_mask", torch.ones_like(whole["input_ids"])).bool()
    return Batch(whole, plain, real, [])
