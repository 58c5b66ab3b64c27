"""The table of docs/models.md: every family through `longspan verify`, on every mesh of 4 and 8 ranks.

    python benchmarks/models_verified.py

Small models of each family with random weights (the configs are those of the tests), windows and chunks shorter than
the sequence, lengths that do not divide; fp32, FSDP on, against fp64 on one process. Writes docs/models.md, and ends
with 1 if anything disagrees.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from pathlib import Path
from typing import Any

import common
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

MESHES = {
    4: [(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 2, 1)],
    8: [(1, 1, 8), (1, 2, 4), (1, 4, 2), (1, 8, 1), (2, 2, 2)],
}
"""data x ring x ulysses."""

CONTEXT = 48


def write_configs(folder: Path) -> dict[str, str]:
    """A config.json for each family; their paths."""
    import transformers

    from tests.models import BASE, FAMILIES

    paths = {}
    for family, changes in FAMILIES.items():
        options = {k: v for k, v in {**BASE, **changes}.items() if v is not None and k != "attn_implementation"}
        config = getattr(transformers, f"{family}Config")(**options)
        config.architectures = [_architecture(config)]
        config.save_pretrained(folder / family)
        paths[family] = str(folder / family / "config.json")
    return paths


def _architecture(config: Any) -> str:
    import transformers

    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM):
        found = auto._model_mapping.get(type(config), None)
        if found is not None and (auto is transformers.AutoModelForMaskedLM or config.model_type != "bert"):
            return str(found.__name__)
    raise ValueError(f"no language model for {type(config).__name__}")


def features(config: Any) -> str:
    """What is particular about a family's attention, read from its config."""
    text = config.get_text_config()
    kinds = list(dict.fromkeys(getattr(text, "layer_types", None) or []))
    has = {
        "bidirectional": config.architectures[0].endswith("ForMaskedLM"),
        f"window {getattr(text, 'sliding_window', None)}": "sliding_attention" in kinds
        or (not kinds and getattr(text, "sliding_window", None)),
        f"chunks {getattr(text, 'attention_chunk_size', None)}": "chunked_attention" in kinds,
        "alternating layers": len(kinds) > 1,
        "softcap": getattr(text, "attn_logit_softcapping", None),
        "sinks": text.model_type == "gpt_oss",
        "NoPE layers": 0 in (getattr(text, "no_rope_layers", None) or [1]),
        "learnt positions": text.model_type in ("gpt2", "bert"),
        "experts": max(getattr(text, k, None) or 0 for k in ("num_experts", "num_local_experts")) > 1,
    }
    return ", ".join(name for name, there in has.items() if there) or "causal"


def body(paths: dict[str, str], meshes: list[list[int]]) -> list[dict[str, Any]]:
    """On every rank: verify every family on every mesh."""
    from longspan.verify.config import VerifyConfig
    from longspan.verify.job import worker

    rows = []
    for family, path in paths.items():
        for data, ring, ulysses in meshes:
            config = VerifyConfig(
                config=Path(path), context=CONTEXT, data_degree=data, ring=ring, ulysses=ulysses, batch=1
            )
            _fresh_groups()
            report = worker(config)
            if dist.get_rank() == 0:
                print(f"{family} {data} x {ring} x {ulysses}: {'ok' if report.passed else 'FAILED'}", flush=True)
            logits = next(c for c in report.checks if c.name == "logits")
            rows.append(
                {
                    "family": family,
                    "mesh": [data, ring, ulysses],
                    "passed": report.passed,
                    "worst": max(s / most for c in report.checks for s, most in zip(c.sharded, c.limit, strict=True)),
                    "error": max(logits.sharded),
                    "comparisons": len(report.checks) + len(report.equalities),
                }
            )
    return rows


def _fresh_groups() -> None:
    """A verify has a process to itself; here hundreds follow one another, and their groups would pile up."""
    global _run
    _run += 1
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore(f"run{_run}", _base_store())
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


_run = 0


@functools.cache
def _base_store() -> Any:
    """The store of the first group, which every later group shares."""
    return dist.distributed_c10d._get_default_store()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", help="only these; docs/models.md is then left alone")
    args = parser.parse_args()
    import transformers

    env = common.environment(["torch", "transformers"])
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        paths = write_configs(Path(folder))
        paths = {f: p for f, p in paths.items() if not args.family or f in args.family}
        kinds = {f: features(transformers.AutoConfig.from_pretrained(p)) for f, p in paths.items()}
        names = {f: transformers.AutoConfig.from_pretrained(p).architectures[0] for f, p in paths.items()}
        for world, meshes in MESHES.items():
            rows += common.run_ranks(body, world, paths, [list(mesh) for mesh in meshes])
    cells = []
    for family in paths:
        cell = [names[family], kinds[family]]
        for world in MESHES:
            mine = [r for r in rows if r["family"] == family and r["mesh"][0] * r["mesh"][1] * r["mesh"][2] == world]
            passed = sum(r["passed"] for r in mine)
            cell.append(f"{passed} of {len(mine)}, {max(r['worst'] for r in mine):.2f}")
        cells.append([*cell, f"{max(r['error'] for r in rows if r['family'] == family):.1e}"])
    text = common.table(["model", "attention", "4 ranks", "8 ranks", "error of logits"], cells)
    print(text)
    total = sum(r["comparisons"] for r in rows)
    failed = [r for r in rows if not r["passed"]]
    if not args.family:
        (ROOT / "docs" / "models.md").write_text(page(text, env, total))
        print("\nwritten: docs/models.md")
    for r in failed:
        print(f"FAILED: {r}")
    sys.exit(1 if failed else 0)


def page(text: str, env: dict[str, Any], comparisons: int) -> str:
    def spelled(mesh: tuple[int, int, int]) -> str:
        return " x ".join(str(size) for size in mesh)

    meshes = "; ".join(f"{world} ranks: {', '.join(map(spelled, of))}" for world, of in MESHES.items())
    versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items())
    return f"""# Models

Written by `{env["command"]}` on {env["date"]} ({versions}, Python {env["python"]}); not by hand.

Each family went through `longspan verify` on every mesh of data x ring x ulysses below: {comparisons:,} comparisons of
loss, logits and every gradient with one process, in fp32 against fp64. Small models with random weights, windows and
chunks shorter than the {CONTEXT - 1} tokens, a length that no mesh divides, zigzag, keys and values from neighbour to
neighbour, FSDP on. A column says on how many meshes all comparisons passed, and the largest error over its limit (1.00
would just pass; [verify.md](verify.md) says what the limit is).

Meshes: {meshes}.

{text}

Refused, with the layer and the reason: encoder-decoders (T5, Whisper: cross attention), ALiBi models that build their
own bias (BLOOM, MPT), linear attention, Mamba and other layers that mix tokens without attention, models that count
positions themselves, question answering, classifiers that pool hidden states (BERT's first token). Classifiers of
sequences by the last token's scores (reward models: `AutoModelForSequenceClassification` of the causal families above)
and of tokens are compared with one process in `tests/test_classify.py`. What is not in the table and not refused: run
`longspan verify` on it.
"""


if __name__ == "__main__":
    main()
