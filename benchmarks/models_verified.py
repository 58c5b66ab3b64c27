"""Write docs/reference/models.md: language, vision-language and diffusion models, sharded.

    python -m benchmarks.models_verified [--family causal/llama ...]

For each family in transformers' own lists a small model with random weights (`tests/fuzz/families.py`) takes a
training step and generates as in `CASES`, and is compared with plain transformers in one process. Those of `CHECKS`
also train on every mesh of so many ranks. Results are stored in runs/models.json, so an interrupted run continues;
`--again` starts from the beginning. The exit code is 1 if anything differs.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import common
from tests.diffusion import test_diffusion
from tests.diffusion.diffusing import CLASSES
from tests.fuzz.__main__ import BLOCK, Pools
from tests.fuzz.cases import Case
from tests.fuzz.families import families
from tests.fuzz.run import judge, refusal
from tests.hf import pictures, test_hybrids, test_rule, test_vision
from tests.models import HYBRIDS, meshes
from tests.pool import RankError, RankHang

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "runs" / "models.json"
CASES: dict[str, dict[str, Any]] = {
    "training": {"mesh": {"ulysses": 2}, "length": 21},
    "generation": {"mesh": {"ulysses": 2}, "job": "generate", "generation": {"max_new_tokens": 3}, "padding": "left"},
}
"""Cases of every family: changes of the default case, a step of two rows of 21 tokens with FSDP."""
CHECKS: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "recurrent": (test_hybrids.check_every_mesh, HYBRIDS, (4, 8)),
    "vision": (test_vision.check_every_mesh, pictures.FAMILIES, (2, 4, 8)),
    "sounds": (test_rule.check_sounds, test_rule.SOUNDS, (4, 8)),
    "diffusion": (test_diffusion.check_class, CLASSES, (2, 4)),
}
"""What trains on every mesh: the check, the families and the numbers of ranks."""
ON_MESHES = "on every mesh"
"""Its row in the results; a cell is a family and a number of ranks."""


UNPADDED = "of prompts without padding on the left"
"""Of families that count padding on the left, in transformers too."""


def verify(name: str, names: list[str], pools: Pools) -> dict[str, list[str]]:
    """Return the outcome of a column's case for several families."""
    outcomes = judge([Case(family, **CASES[name]) for family in names], pools)
    for at, (family, outcome) in enumerate(zip(names, outcomes, strict=True)):
        if outcome.kind == "refused" and "with padding on the right only" in outcome.text:
            [outcome] = judge([Case(family, **{**CASES[name], "padding": ""})], pools)
            outcomes[at] = replace(outcome, text=UNPADDED) if outcome.kind == "equal" else outcome
    for family, outcome in zip(names, outcomes, strict=True):
        print(f"{family:32} {name:20} {outcome.kind:8} {_line(outcome.text)}", flush=True)
    return {family: [outcome.kind, outcome.text] for family, outcome in zip(names, outcomes, strict=True)}


def verify_meshes(check: Any, name: str, ranks: int, pools: Pools) -> list[str]:
    """Return the outcome of a family on every mesh of so many ranks."""
    found = ["equal", ""]
    try:
        check(pools, ranks, name)
    except (RankError, RankHang, AssertionError) as error:
        found = ["failed", str(error)]
    print(f"{name:32} {ranks} ranks {found[0]:8} {_line(found[1])}", flush=True)
    return found


def _line(text: str, most: int = 200) -> str:
    """Return the last line of a text, up to so many characters."""
    return text.strip().rpartition("\n")[2].strip()[:most]


def main(family: tuple[str, ...] = (), again: bool = False) -> None:
    """Write the page.

    Args:
        family: only these; docs/reference/models.md is then left alone, and their rows are printed.
        again: ignore the results of an earlier run.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    if again:
        RESULTS.unlink(missing_ok=True)
    RESULTS.parent.mkdir(exist_ok=True)
    names = family or [name for name in families() if not name.startswith("vision/")]
    rows: dict[str, Any] = {} if family or not RESULTS.exists() else json.loads(RESULTS.read_text())
    pools = Pools()

    def store(name: str, column: str, found: list[str]) -> None:
        rows.setdefault(name, {})[column] = found
        if not family:
            RESULTS.write_text(json.dumps(rows))

    try:
        for each in names:
            if each not in rows:
                outcome = refusal(each, pools)
                store(each, "accepted", [outcome.kind, outcome.text])
        for column, case in CASES.items():
            todo = [each for each in names if rows[each]["accepted"][0] == "equal" and column not in rows[each]
                    and (not each.startswith("masked") or case.get("job") != "generate")]  # fmt: skip
            for at in range(0, len(todo), BLOCK):
                for each, found in verify(column, todo[at : at + BLOCK], pools).items():
                    store(each, column, found)
        for check, of, counts in () if family else CHECKS.values():
            for ranks, each in itertools.product(counts, of):
                if f"{each} {ranks}" not in rows.get(ON_MESHES, {}):
                    store(ON_MESHES, f"{each} {ranks}", verify_meshes(check, each, ranks, pools))
    finally:
        pools.close()
    failed = [(each, *cell) for each, row in rows.items() for cell in row.items() if cell[1][0] == "failed"]
    if not family:
        (ROOT / "docs" / "reference" / "models.md").write_text(page(rows))
        print("written: docs/reference/models.md")
    for kind in dict.fromkeys(each.partition("/")[0] for each in family):
        print(_table({each: row for each, row in rows.items() if row["accepted"][0] == "equal"}, kind))
    for each, column, found in failed:
        print(f"FAILED: {each}, {column}: {found[1]}")
    sys.exit(1 if failed else 0)


def page(rows: dict[str, dict[str, list[str]]]) -> str:
    """Return docs/reference/models.md."""
    rows = dict(rows)
    on_meshes = rows.pop(ON_MESHES)
    count = {n: len(meshes(n)) for n in (2, 4, 8)}
    env = common.environment(["torch", "transformers"])
    versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items())
    run, refused, unbuilt = (
        {family: row for family, row in rows.items() if row["accepted"][0] == kind}
        for kind in ("equal", "refused", "plain")
    )
    reasons: dict[str, list[str]] = {}
    for family, row in refused.items():
        reasons.setdefault(_reason(_line(row["accepted"][1], 10_000)), []).append(family)
    missing = dict[str, list[str]]()
    for family, row in unbuilt.items():
        missing.setdefault(_escaped(_line(row["accepted"][1])), []).append(family)
    why = [[reason, _names(families)] for reason, families in sorted(reasons.items(), key=lambda item: -len(item[1]))]
    kinds = [row[name][0] for row in run.values() for name in CASES if name in row]
    return f"""# Models

Look up whether a family of transformers trains and generates sharded.

Written by `{env["command"]}` on {env["date"]} ({versions}, Python {env["python"]}); do not edit.

Each causal, masked, image-text-to-text and audio-text-to-text model of transformers ({len(rows)} together) was made
small, with random weights, and compared with one process: loss, logits and every gradient. {len(run)} are
accepted, {len(refused)} are refused, and of {len(unbuilt)} no small model could be made. {kinds.count("equal")} of the
{len(kinds)} cases are equal up to fp32 rounding.

- *Training*: a step on two Ulysses ranks with FSDP, of a length that they do not divide
- *Generation*: greedy, of left-padded prompts unless the table says otherwise, with a cache
- *Recurrent layers and short convolutions*: also a step on each of {count[4] + count[8]} meshes of 4 and 8 ranks:
  {_equal(on_meshes, "recurrent")}
- *Vision-language*: the same on each of {sum(count.values())} meshes of 2, 4 and 8 ranks, of rows with and without
  pictures: {_equal(on_meshes, "vision")}
- *Sounds*: training and generation on {sum(map(len, test_rule.WITH_SOUNDS.values()))} meshes of 4 and 8 ranks:
  {_equal(on_meshes, "sounds")}
- *Diffusion*: output and gradients on each mesh of 2 and 4 ranks, Ulysses and rings:
  {_equal(on_meshes, "diffusion")}

In the tables "plain" means that transformers itself cannot run the case. Names are `model_type` in `config.json`.
[`longspan verify`](../how-to/verify.md) checks your model.

## Causal

{_table(run, "causal")}

[Experts over ranks](../explanation/experts.md) are tested with Mixtral, Qwen3-MoE, gpt-oss, DeepSeek-V3, GLM-4.5 MoE
and Llama-4. Other families that stack their experts run the same code.

## Masked

{_table(run, "masked")}

## Pictures and sounds

Some rows of a batch have each of the inputs that are named. Norms over a batch are in evaluation mode. There is no
tensor axis. Gemma-3n was tried with timm installed, from which it takes its picture tower.

{_table(run, "types")}

## Diffusion

Names are those of classes of diffusers. Another class is accepted if the check of `parallelize` passes.

{_rows("model", "training")}
{chr(10).join(f"|{x}|equal|" for x in CLASSES if _on_all(on_meshes, "diffusion", x))}

## Refused

{_rows("the model or a layer", "models")}
{chr(10).join(f"|{reason}|{families}|" for reason, families in why)}

## Not tried

transformers itself could not build or run a small model of these.

{_rows("why", "models")}
{chr(10).join(f"|{reason}|{_names(families)}|" for reason, families in missing.items())}
"""


def _on_all(found: dict[str, list[str]], kind: str, family: str) -> bool:
    return all(found[f"{family} {ranks}"][0] == "equal" for ranks in CHECKS[kind][2])


def _equal(found: dict[str, list[str]], kind: str) -> str:
    _, families, counts = CHECKS[kind]
    kinds = [found[f"{family} {ranks}"][0] for family in families for ranks in counts]
    return f"{kinds.count('equal')} of {len(kinds)} runs, by family and ranks, are equal"


def _names(families: list[str]) -> str:
    return ", ".join(dict.fromkeys(re.sub("^(causal|types)/", "", family) for family in families))


def _table(run: dict[str, dict[str, list[str]]], kind: str) -> str:
    """Return a table of the accepted models of a kind, with a column for each case; without spaces, as it is long."""
    models = {name.partition("/")[2]: row for name, row in run.items() if name.startswith(f"{kind}/")}
    columns = [name for name in CASES if any(name in row for row in models.values())]
    inputs = ["inputs"] if kind == "types" else []
    lines = list[str]()
    for model, row in sorted(models.items()):
        read = [row["accepted"][1] or "text" for _ in inputs]
        lines.append(f"|{'|'.join([model, *read, *(_cell(*row[name]) for name in columns)])}|")
    return "\n".join([_rows("model", *inputs, *columns), *lines])


def _rows(*columns: str) -> str:
    """Return the first two lines of a table."""
    return f"|{'|'.join(columns)}|\n|{'|'.join('---' for _ in columns)}|"


def _cell(kind: str, text: str) -> str:
    """Return the outcome of a case, and why it is not equal, without the names of layers and details."""
    if kind == "equal":
        return f"{kind}, {text}" if text == UNPADDED else kind
    why = _line(text).split(": ", 1)[-1].split(". ")[0] if kind == "plain" else re.split("[;,] ", _line(text))[0]
    return _escaped(f"{kind}: {why}")


def _escaped(text: str) -> str:
    """Return a text that is no end of a cell, nor a link, in Markdown."""
    return re.sub(r"([|\[\]])", r"\\\1", text)


def _reason(text: str) -> str:
    """Return why a model is refused, without the names of model and layer."""
    text = re.sub(r"^\w+ is an? [\w-]+ model that cannot be sharded: ", "", text)
    text = re.sub(r"^(the embeddings of |every attention layer of |layer [\w.]+ (\(\w+\) )?of )?\w+ ", "", text)
    return re.split(r"[;:,(]", text)[0].strip()


if __name__ == "__main__":
    common.command(main, __doc__)
