"""The cost of consistency checks between ranks: of batches at every forward, and of replicas' weights.

    python benchmarks/agreement_cost.py        # a few minutes

One training step (forward, backward, AdamW) of a small Llama (`examples/llama-tiny.json`), for which checks cost the
most, in the same processes and in alternation:

    plain     no checks (`check_batches=0, check_weights=0`)
    batches   every forward (the default)
    weights   `fsdp=False`, a digest of all weights in every forward: 100 times as often as by default
    at rest   `check_at_rest=True`: a digest of this rank's weights twice a step

Each check is also timed alone, many times: the gather of five numbers over the ranks with the digest of the batch, and
the digest of all weights. A step's time varies by more than either, so read these figures.
Goal: the digest of the weights, every 100 forwards, below 0.1 % of a step.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist

import longspan
from longspan.comm.consistency import gather_numbers
from longspan.comm.digests import Digester
from longspan.hf.checks.batches import _call_facts, _content, _number, _structure

MODEL = Path(__file__).resolve().parents[1] / "examples" / "llama-tiny.json"
EVERY = 100  # forwards between two comparisons of weights, by default
CANDIDATES: dict[str, dict[str, Any]] = {
    "plain": {"check_batches": 0, "check_weights": 0},
    "batches": {"check_weights": 0},
    "weights": {"check_batches": 0, "check_weights": 1},
    "at rest": {"check_batches": 0, "check_weights": 0, "check_at_rest": True},
}


def measure(context: int, repeats: int) -> dict[str, Any]:
    """Time steps in alternation, then checks alone: wall seconds of the slowest rank, CPU seconds of the busiest."""
    import transformers

    sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=dist.get_world_size()))
    config = transformers.LlamaConfig(**json.loads(MODEL.read_text()))
    ids = torch.randint(3, 384, (1, context), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    steps: dict[str, Callable[[], object]] = {}
    model: Any = None
    for name, options in CANDIDATES.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).train()
        model = longspan.parallelize(model, sp, fsdp=False, **options)
        steps[name] = _step(model, torch.optim.AdamW(model.parameters(), lr=1e-4), batch)
    wall, cpu = common.alternate(steps, repeats, warmup=2, busiest=True)
    group = sp.world_group
    assert group is not None
    parameters = list(model.parameters())
    digester = Digester(torch.device("cpu"))

    def agree() -> None:
        numbers = [
            0,
            _number(_call_facts(model, batch, False)),
            _number(_structure(batch)),
            _content(batch, False) or 0,
            0,
        ]
        gather_numbers(numbers, group, torch.device("cpu"))

    def local() -> None:
        _number(_call_facts(model, batch, False)), _number(_structure(batch)), _content(batch, False)

    def digest() -> None:
        int(digester.joint(parameters))

    alone = common.alternate({"agree": agree, "local": local, "digest": digest}, 4 * repeats, warmup=3, busiest=True)
    found = {"wall": wall, "cpu": cpu, "alone wall": alone[0], "alone cpu": alone[1]}
    return {**found, "bytes": sum(p.nbytes for p in parameters)}


def _step(model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> Callable[[], object]:
    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Measure on 2 and 4 ranks, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--name", default="agreement-cost")
    args = parser.parse_args()
    env = common.environment(["torch", "transformers", "longspan"])
    rows, data = [], {}
    for ranks in args.ranks:
        for context in args.contexts:
            found = common.run_ranks(measure, ranks, context, args.repeats)
            data[f"{ranks} ranks, {context} tokens"] = found
            for clock in ("wall", "cpu"):
                alone = {name: common.median(x) for name, x in found[f"alone {clock}"].items()}
                plain = found[clock]["plain"]
                step = common.median(plain)
                ratios = [common.paired_ratio(found[clock][name], plain) for name in CANDIDATES if name != "plain"]
                rows.append(
                    [
                        f"{ranks} x {context}, {clock}",
                        f"{step * 1e3:.1f}",
                        *(f"{ratio:.3f}" for ratio in ratios),
                        *(f"{alone[name] * 1e6:.0f}" for name in ("agree", "local", "digest")),
                        f"{alone['agree'] / step:.3%}",
                        f"{alone['digest'] / EVERY / step:.4%}",
                    ]
                )
    header = ["ranks x tokens, clock", "step ms", "batches/plain", "weights/plain", "at rest/plain"]
    header += ["agree us", "of it local", "digest us", "agree/step", f"digest/{EVERY}/step"]
    body = common.table(header, rows)
    print(body)
    common.write_report(args.name, "The cost of consistency checks between ranks", env, body, data)


if __name__ == "__main__":
    main()
