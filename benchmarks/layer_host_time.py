"""Host time that longspan adds to a layer of plain transformers, on one device.

    python benchmarks/layer_host_time.py

Llamas with a hidden size of 64: nearly all of a layer's time is the host's. A layer's time is the difference between
10 and 2 layers over 8. CPU seconds of the process, not wall-clock time; all candidates alternate within a round. The
default memory options recompute an MLP's activation; the last column saves it, as plain transformers does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import common
import torch
import transformers

import longspan

LAYERS = (2, 10)
CANDIDATES: dict[str, longspan.Memory | None] = {  # None: plain transformers
    "plain": None,
    "longspan": longspan.Memory(),
    "activations saved": longspan.Memory(recompute_mlp_act=False),
}
HEADER = [
    "tokens", "documents", "of a layer", *(f"{name}, us" for name in CANDIDATES),
    "longspan: added / plain", "activations saved: added / plain",
]  # fmt: skip


def main(tokens: tuple[int, ...] = (64, 256, 1024), repeats: int = 40, name: str = "layer-host-time") -> None:
    """Time layers of every length, with one and with four documents."""
    torch.set_num_threads(1)
    env, cells, rows = common.environment(["longspan", "torch", "transformers"]), [], []
    for length in tokens:
        for documents in (1, 4):
            for train in (False, True):
                of = layer_time(length, documents, repeats, train=train)
                rows.append({"tokens": length, "documents": documents, "train": train, "seconds": of})
                added = [f"{of[name] / of['plain'] - 1:.2f}" for name in list(CANDIDATES)[1:]]
                cells.append([f"{length:,}", str(documents), "forward, backward" if train else "forward",
                              *(f"{x * 1e6:.0f}" for x in of.values()), *added])  # fmt: skip
    common.write_report(name, "Host time of a layer", env, common.table(HEADER, cells), rows)


def layer_time(tokens: int, documents: int, repeats: int, *, train: bool) -> dict[str, float]:
    """Return each candidate's seconds of a layer."""
    sp = longspan.SequenceSharding(longspan.init_mesh(device_type="cpu"))
    ids = torch.randint(0, 128, (1, tokens))
    batch = {"input_ids": ids, "position_ids": torch.arange(tokens // documents).repeat(documents)[None]}
    steps: dict[tuple[int, str], Callable[[], object]] = {}
    for layers in LAYERS:
        for name, memory in CANDIDATES.items():
            model = make_model(layers).train(train)
            if memory is not None:
                model = longspan.parallelize(model, sp, fsdp=False, memory=memory)
            steps[layers, name] = step_of(model, batch, train)
    seconds: dict[tuple[int, str], list[float]] = {key: [] for key in steps}
    for number in range(repeats + 3):
        for key, step in steps.items():
            start = time.process_time()
            step()
            if number >= 3:
                seconds[key].append(time.process_time() - start)
    few, many = LAYERS
    medians = {key: median(values) for key, values in seconds.items()}
    return {name: (medians[many, name] - medians[few, name]) / (many - few) for name in CANDIDATES}


def make_model(layers: int) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=128,
        )
    )  # fmt: skip


def step_of(model: Any, batch: dict[str, Any], train: bool) -> Callable[[], object]:
    def step() -> None:
        if train:
            model(**batch, labels=batch["input_ids"]).loss.backward()
            model.zero_grad()
        else:
            with torch.no_grad():
                model(**batch)

    return step


if __name__ == "__main__":
    common.command(main, __doc__)
