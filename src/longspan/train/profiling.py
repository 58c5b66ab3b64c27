"""Record a training step of every rank with torch's profiler, as one trace for Perfetto."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

from longspan.comm.mesh import SequenceSharding
from longspan.tracing.record import Recorder, gather_trace
from longspan.tracing.spans import read_trace, summary_lines


class Profile(TrainerCallback):  # type: ignore[misc]
    """Writes `output_dir/profile/step-N.trace.json`, and prints where the time of a step went. Collective."""

    def __init__(self, step: int, sp: SequenceSharding) -> None:
        self.step, self.sp = step, sp
        self.recorder, self.recording = Recorder(sp.device), contextlib.ExitStack()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the profiler."""
        if state.global_step + 1 == self.step:
            self.recording.enter_context(self.recorder.step(self._barrier))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop it, and write the trace of all ranks."""
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
