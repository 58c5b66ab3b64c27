"""What `longspan train` adds to a trainer: the watch knows what a rank does, a step is recorded, rows are printed."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

from longspan.comm.mesh import SequenceSharding
from longspan.ranks.watch import Watch
from longspan.tracing.record import Recorder, gather_trace
from longspan.tracing.spans import read_trace, summary_lines

_MOST = 240  # characters of a run of tokens


class Progress(TrainerCallback):  # type: ignore[misc]
    """Tells the watch what this rank does."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.watch.at("training", state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.watch.at("after the step", unlimited=True)  # it may evaluate or save


class Profile(TrainerCallback):  # type: ignore[misc]
    """Records a step of every rank for Perfetto: `output_dir/profile/step-N.trace.json`. Collective.

    It also prints where the time of the step went.
    """

    def __init__(self, step: int, sp: SequenceSharding) -> None:
        self.step, self.sp = step, sp
        self.recorder, self.recording = Recorder(sp.device), contextlib.ExitStack()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step + 1 == self.step:
            self.recording.enter_context(self.recorder.step(self._barrier))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step != self.step:
            return
        self.recording.close()
        events = gather_trace(self.recorder.events, self.sp.host_group)
        if state.is_world_process_zero:
            path = Path(args.output_dir) / "profile" / f"step-{self.step}.trace.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"traceEvents": events}))
            print(f"trace: {path}", *summary_lines(read_trace(events)), sep="\n", flush=True)

    def _barrier(self) -> None:
        if self.sp.host_group is not None:
            dist.barrier(group=self.sp.host_group)


def preview(trainer: Any, count: int) -> None:
    """Print the first `count` sequences as the model will see them, on the first rank, tokens with a loss in ⟦ ⟧."""
    loader = trainer.get_train_dataloader()
    if not trainer.is_world_process_zero():
        return
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    rows = ((ids, labels) for batch in loader for ids, labels in zip(*_rows(batch), strict=True))
    for number, (ids, labels) in enumerate(itertools.islice(rows, count), 1):
        losses = sum(label >= 0 for label in labels)
        print(f"--- sequence {number} of {count}: {len(ids):,} tokens, {losses:,} with a loss, in ⟦ ⟧")
        for loss, run in itertools.groupby(zip(ids, labels, strict=True), lambda pair: pair[1] >= 0):
            text = _printable(tokenizer.decode([token for token, _ in run]))
            print(f"⟦{text}⟧" if loss else text, end="")
        print(flush=True)


def _rows(batch: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the ids and labels of a batch's rows; DPO's and reward models' rows have no labels."""
    ids, labels = batch["input_ids"].tolist(), batch.get("labels", batch["input_ids"]).tolist()
    return ids, [row if isinstance(row, list) else own for row, own in zip(labels, ids, strict=True)]


def _printable(text: str) -> str:
    """Return a text without characters that would control the terminal, and without the middle of a long one."""
    left_out = len(text) - _MOST
    if left_out > 0:
        text = f"{text[: _MOST // 2]} ... {left_out:,} characters ... {text[-_MOST // 2 :]}"
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
