"""Callbacks of a sharded trainer: stop before a bad update, stop after a signal, log a step's speed in one line.

A trainer of `longspan.trainer` adds `StopAtNonFinite` itself, and `StopOnSignal` for `enable_jit_checkpoint=True`.
Others are added to a trainer: `trainer.add_callback(Figures(trainer))`, `StepLine.replace_printer(trainer)`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from longspan.compat.torch_api import profiler_records
from longspan.core.errors import LongspanError
from longspan.hf.batch.shard import WIDTH
from longspan.hf.model.support import layers_without_backward, transformers_model
from longspan.hf.nonfinite import NonFinite, watch
from longspan.hf.state import state_of
from longspan.hf.weights.quantized import number_of_weights
from longspan.plan.from_model import shape_of
from longspan.ranks.launch import StopRequest
from longspan.trainers.figures import CommunicationSampler, count_tokens, model_flops, peak_flops, peak_memory

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class _OfTrainer(TrainerCallback):  # type: ignore[misc]
    """A callback that reads its trainer."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer


class StopAtNonFinite(_OfTrainer):
    """Raises before an update by gradients that are not finite, and names the first such value. Collective."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Remember where the run starts."""
        self.started = state.global_step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Check the gradients' norm and the losses; weights do not change."""
        trainer, step = self.trainer, self.trainer.longspan_step
        if trainer.accelerator.scaler is not None:  # with fp16 it skips such updates
            return
        norm = step.norm
        if norm is None:
            norm = trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), math.inf)
        norm = torch.as_tensor(norm.full_tensor() if isinstance(norm, DTensor) else norm, device=args.device)
        values = torch.stack([x.detach().float() for x in (norm, *step.losses)])
        wrong, group = (~values.isfinite().all()).float(), trainer.longspan_sp.world_group
        if group is not None:
            dist.all_reduce(wrong, dist.ReduceOp.MAX, group=group)
        if not wrong:
            return
        first = watch(trainer.model, trainer.longspan_sp, trainer.longspan_repeat_step)
        raise LongspanError(self._explain(args, state.global_step + 1, values[1:].sum().item(), norm.item(), first))

    def _explain(self, args: Any, step: int, loss: float, norm: float, first: NonFinite | None) -> str:
        what = f"loss {loss} and gradient norm {norm} at step {step}"
        saved = f"checkpoints in {args.output_dir} are untouched"
        if first is None:
            return (
                f"{what}, and finite when the step was repeated from the same state: a transient fault of a machine "
                f"(memory, a device, a link), not of the model; {saved}, resume from the last one; if it happens "
                f"again, test the machines"
            )
        if first.kind == "weight" and step == self.started + 1:
            origin = "checkpoint" if self.started else "model"
            return f"{what}: {first} already in the {origin} that the run started from; start from another one"
        if first.kind == "weight":
            return (
                f"{what}: {first} since the update of step {step - 1}, whose gradients were finite: the optimizer "
                f"caused it, or memory was damaged; {saved}, resume from one, and if it happens again check the "
                f"optimizer's settings"
            )
        return (
            f"{what}: the run has diverged; first not finite: {first}; {saved}, resume from one with a smaller "
            f"learning_rate (now {args.learning_rate}) or a longer warmup"
        )


class StopOnSignal(TrainerCallback):  # type: ignore[misc]
    """Saves and ends all ranks after a step in which any rank received SIGTERM or SIGUSR1.

    Args:
        request: a caller's, which catches the signals for longer than the training.

    Attributes:
        signum: the signal that ended the run, on every rank; 0 for none.
    """

    def __init__(self, request: StopRequest | None = None) -> None:
        self.own, self.request = request is None, request or StopRequest("", signals=SIGNALS)
        self.signum, self.catching = 0, contextlib.ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Catch the signals."""
        self.signum = 0
        if self.own:
            self.request.signum = None
            self.catching.enter_context(self.request)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Compare the ranks. Collective."""
        if self.received(args.device):
            control.should_save = control.should_training_stop = True
            if state.is_world_process_zero:
                name = signal.Signals(self.signum).name
                print(f"longspan: {name}: saving and stopping after step {state.global_step}", file=sys.stderr)

    def received(self, device: torch.device) -> int:
        """Return the signal that any rank has received, or 0. Collective."""
        signum = torch.tensor(self.request.signum or 0, device=device)
        if dist.is_initialized():
            dist.all_reduce(signum, op=dist.ReduceOp.MAX)
        self.signum = int(signum)
        return self.signum

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore the previous handlers."""
        self.close()

    def close(self) -> None:
        """Restore the previous handlers, also after a step that raised."""
        self.catching.close()


class Figures(_OfTrainer):
    """Adds to each step's log what it cost, over the whole job and the steps since the last log.

    - `tokens_per_second`: without padding, and without the time between steps (data, evaluation, checkpoints)
    - `mfu`: model FLOP/s (`figures.model_flops`) over the GPUs' dense bf16 peak, if both are known
    - `memory_gib`: peak of any rank since the start: CUDA's allocator, or the process's resident memory
    - `communication`: share of the logged step's time with a collective in flight (`figures.CommunicationSampler`)
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self.sampler = CommunicationSampler(trainer.longspan_sp.device)
        self.sampling = contextlib.ExitStack()
        self.seconds, self.counted = 0.0, list[tuple[Tensor, float]]()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock, and the profiler if this step is logged and no other one records it."""
        logged = (state.global_step + 1) % state.logging_steps == 0
        if self.trainer.longspan_sharded and logged and not profiler_records():
            self.sampling.enter_context(self.sampler.measure())
        self.start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop both, and count the step's tokens."""
        sp = self.trainer.longspan_sp
        if sp.device.type == "cuda":
            torch.cuda.synchronize(sp.device)
        self.seconds += time.perf_counter() - self.start
        self.close()
        for inputs, *_rest in self.trainer.longspan_step.batches:
            self.counted.append((count_tokens(inputs), 1 / (inputs.get(WIDTH, sp.size) * sp.tensor_size)))

    def close(self) -> None:
        """Stop the profiler, also in a step that raised."""
        self.sampling.close()

    def take(self) -> dict[str, float]:
        """Return the figures of the steps since the last call. Collective."""
        trainer, sp = self.trainer, self.trainer.longspan_sp
        sums = sum((x.double().to(sp.device) * share for x, share in self.counted), torch.zeros(2, device=sp.device))
        sampled, self.sampler.share = self.sampler.share, None
        share = torch.tensor([(sampled or 0.0) / sp.world_size], device=sp.device)
        sums, most = torch.cat([sums.double(), share.double()]), torch.tensor(peak_memory(sp.device), device=sp.device)
        if sp.world_group is not None:
            dist.all_reduce(sums, group=sp.world_group)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=sp.world_group)
        tokens, pairs, communication = sums.tolist()
        seconds, self.seconds = self.seconds, 0.0
        self.counted.clear()
        if not seconds:
            return {}
        found = {"tokens_per_second": tokens / seconds, "memory_gib": most.item()}
        if sampled is not None:
            found["communication"] = communication
        weights = next(p.dtype for p in trainer.model.parameters() if p.is_floating_point())
        dtype = torch.bfloat16 if trainer.args.bf16 else trainer.longspan_policy("param_dtype") or weights
        peak = peak_flops(sp.device, dtype)
        if peak is not None and self._models:
            flops = sum(
                model_flops(tokens=round(tokens), attention_pairs=round(pairs), **each) for each in self._models
            )
            found["mfu"] = flops / (seconds * peak * sp.world_size)
        return found

    @functools.cached_property
    def _models(self) -> list[dict[str, Any]]:
        """Arguments of `model_flops` of the model and its teacher, read once: the planner builds them on the meta
        device. None if it cannot.
        """
        model, teacher = self.trainer.model, getattr(self.trainer, "teacher_model", None)
        try:
            shape, *others = (shape_of(state_of(each).config) for each in (model, teacher) if each is not None)
        except LongspanError:
            return []
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad) / number_of_weights(model)
        frozen = layers_without_backward(transformers_model(model))
        forwards = 2 if hasattr(self.trainer, "ref_model") else 1
        mine = {"shape": shape, "trained": float(trained), "forwards": forwards, "frozen": frozen}
        return [mine, *({"shape": other, "backwards": 0} for other in others)]


class StepLine(TrainerCallback):  # type: ignore[misc]
    """Prints a step as one line of at most 80 columns, in place of a dictionary."""

    width = 80
    shown = {  # noqa: RUF012
        "loss": "loss {:.4f}",
        "rewards/accuracies": "accuracy {:.0%}",
        "grad_norm": "grad {:.3g}",
        "learning_rate": "lr {:.1e}",
        "tokens_per_second": "{:,.0f} tok/s",
        "mfu": "MFU {:.0%}",
        "memory_gib": "{:.1f} GiB",
        "communication": "comm {:.0%}",
    }

    @classmethod
    def replace_printer(cls, trainer: Any) -> None:
        """Take the place of transformers' callbacks that print."""
        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
        trainer.add_callback(cls())

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Print on the first rank."""
        if state.is_world_process_zero and logs:
            for line in self.lines(state.global_step, state.max_steps, logs):
                print(line, flush=True)

    def lines(self, step: int, steps: int, logs: dict[str, Any]) -> list[str]:
        """Format a step, an evaluation, or the end of the run."""
        if "loss" in logs:
            known = [text.format(logs[key]) for key, text in self.shown.items() if key in logs]
            return [self._fitting([f"{step}/{steps}", *known])]
        if "train_runtime" in logs:
            return [f"{step} steps in {logs['train_runtime']:.0f} s, mean loss {logs['train_loss']:.4f}"]
        losses = {key.removesuffix("_loss"): x for key, x in logs.items() if key.endswith("_loss")}
        lines = []
        for name, loss in losses.items():
            perplexity = [f"perplexity {math.exp(loss):,.2f}"] if loss < 20 else []
            lines.append(self._fitting([f"{name} {step}", f"loss {loss:.4f}", *perplexity]))
            lines += self._by_position(name, logs)
        return lines

    def _fitting(self, parts: list[str]) -> str:
        """Join the first parts that fit, by single spaces if that lets more fit."""
        line = "  ".join(parts)
        if len(line) > self.width:
            line = " ".join(parts)
        return line if len(line) <= self.width else self._fitting(parts[:-1])

    def _by_position(self, name: str, logs: dict[str, Any]) -> list[str]:
        lines = list[str]()
        for key, loss in logs.items():
            if not key.startswith(f"{name}_loss_to_"):
                continue
            part = f"  to {int(key.rpartition('_')[2]):,}: {loss:.4f}"
            if not lines or len(lines[-1]) + len(part) > self.width:
                lines.append("  by position" if not lines else "  ")
            lines[-1] += part
        return lines
