"""The table of docs/models.md: every causal and masked language model of the installed transformers, sharded.

    python benchmarks/models_verified.py [--family causal/llama ...]

For each family in transformers' own lists a small model with random weights (`tests/fuzz/families.py`) is trained for a
step and generates, on each mesh of `CASES`, and is compared with plain transformers in one process, as the tests do.
What is found is kept in runs/models.json, so that a run that was stopped goes on; `--again` starts anew. Writes
docs/models.md, and ends with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "benchmarks"))

import common  # noqa: E402

from tests.fuzz.__main__ import BLOCK, Pools  # noqa: E402
from tests.fuzz.cases import Case  # noqa: E402
from tests.fuzz.families import families, model_name  # noqa: E402
from tests.fuzz.run import judge, refusal  # noqa: E402

KEPT = ROOT / "runs" / "models.json"
CASES: dict[str, dict[str, Any]] = {
    "training": {"mesh": {"ulysses": 2}, "length": 21},
    "generation": {"mesh": {"ulysses": 2}, "job": "generate", "generation": {"max_new_tokens": 3}, "padding": "left"},
}
"""Columns of the table: what differs from a step of two rows of 21 tokens, with FSDP."""


def verify(name: str, names: list[str], pools: Pools) -> dict[str, list[str]]:
    """What became of the case of a column, for several families."""
    outcomes = judge([Case(family, **CASES[name]) for family in names], pools)
    for family, outcome in zip(names, outcomes, strict=True):
        print(f"{family:32} {name:20} {outcome.kind:8} {_line(outcome.text)}", flush=True)
    return {family: [outcome.kind, outcome.text] for family, outcome in zip(names, outcomes, strict=True)}


def _line(text: str) -> str:
    return text.strip().rpartition("\n")[2][:200]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", help="only these; docs/models.md is then left alone")
    parser.add_argument("--again", action="store_true", help="forget what an earlier run found")
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    if args.again:
        KEPT.unlink(missing_ok=True)
    KEPT.parent.mkdir(exist_ok=True)
    names = args.family or families()
    rows: dict[str, Any] = {} if args.family or not KEPT.exists() else json.loads(KEPT.read_text())
    pools = Pools()

    def keep(family: str, column: str, found: list[str]) -> None:
        rows.setdefault(family, {})[column] = found
        if not args.family:
            KEPT.write_text(json.dumps(rows))

    try:
        for family in names:
            if family not in rows:
                outcome = refusal(family, pools)
                keep(family, "accepted", ["equal", ""] if outcome is None else [outcome.kind, outcome.text])
        for column, case in CASES.items():
            todo = [family for family in names if rows[family]["accepted"][0] == "equal" and column not in rows[family]
                    and (family.startswith("causal") or case.get("job") != "generate")]  # fmt: skip
            for at in range(0, len(todo), BLOCK):
                for family, found in verify(column, todo[at : at + BLOCK], pools).items():
                    keep(family, column, found)
    finally:
        pools.close()
    failed = [(family, *cell) for family, row in rows.items() for cell in row.items() if cell[1][0] == "failed"]
    if not args.family:
        (ROOT / "docs" / "models.md").write_text(page(rows))
        print("written: docs/models.md")
    for family, column, found in failed:
        print(f"FAILED: {family}, {column}: {found[1]}")
    sys.exit(1 if failed else 0)


def page(rows: dict[str, dict[str, list[str]]]) -> str:
    """docs/models.md."""
    env = common.environment(["torch", "transformers"])
    versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items())
    run, refused, unbuilt = (
        {family: row for family, row in rows.items() if row["accepted"][0] == kind}
        for kind in ("equal", "refused", "plain")
    )
    notes: dict[str, int] = {}

    def cell(found: list[str] | None) -> str:
        if found is None:
            return "–"
        kind, text = found
        if kind == "equal":
            return "equal"
        note = notes.setdefault(_line(text), len(notes) + 1)
        return f"{kind} [{note}]"

    reasons = [[family, model_name(family), _line(row["accepted"][1])] for family, row in refused.items()]
    body = [[family, model_name(family), *(cell(row.get(name)) for name in CASES)] for family, row in run.items()]
    kinds = [row[name][0] for row in run.values() for name in CASES if name in row]
    return f"""# Models

Written by `{env["command"]}` on {env["date"]} ({versions}, Python {env["python"]}); not by hand.

Each causal and masked language model in transformers' own lists ({len(rows)}) was made small, with random weights, and
compared with plain transformers in one process. {len(run)} are accepted, {len(refused)} are refused, and of
{len(unbuilt)} no small model could be made. {kinds.count("equal")} of the {len(kinds)} cases are equal.

`training` is a step on two Ulysses ranks with FSDP, of a length that they do not divide: loss, logits and every
gradient, in fp32 against fp64, within rounding as `tests/tolerance.py` defines it. `generation` is greedy, of
left-padded prompts with a cache over the ranks. Windows and chunks are shorter than the sequence. Numbers in brackets
stand for the reasons below the table; "plain" means that transformers itself cannot run the case.

- To check your own model on your mesh, run `longspan verify` ([verify.md](verify.md)).
- `make fuzz` draws other batches, meshes and options for the same families.
- Reward models and other classifiers (`AutoModelForSequenceClassification` and `ForTokenClassification`) of the causal
  families are compared in `tests/test_classify.py`.

## Accepted

{common.table(["family", "model", *CASES], body)}

{chr(10).join(f"{number}. {text}" for text, number in notes.items())}

## Refused

{common.table(["family", "model", "why"], reasons)}

## Not tried

Of these no small model could be made from the default config, or transformers itself could not run it:
{", ".join(f"`{family}`" for family in unbuilt)}.
"""


if __name__ == "__main__":
    main()
