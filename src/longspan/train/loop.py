"""The training loop of one rank."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from longspan import checkpoint
from longspan.batch import shard_batch
from longspan.checkpoint import DiskFull, Ranks, RunLock, Saver, is_full
from longspan.data import StepBatch, deal, prefetch
from longspan.errors import LongspanError
from longspan.launch import Stopped, StopRequest
from longspan.mesh import SequenceSharding, init_mesh
from longspan.metrics import (
    CommunicationSampler,
    Display,
    MetricsLog,
    Quiet,
    StepMetrics,
    model_flops,
    peak_flops,
    peak_memory_gib,
)
from longspan.parallelize import parallelize
from longspan.train.config import TrainConfig
from longspan.train.inputs import build_model, open_inputs
from longspan.train.optimizer import clip_gradients, make_optimizer, make_scheduler

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Trainer:
    """Everything one rank holds while it trains. Every rank makes one, in the same order.

    Args:
        config: what to train.

    Raises:
        LongspanError: for what `open_inputs` refuses, a model that cannot be sharded, or another model's checkpoint.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        with _gloo_is_quiet():
            mesh = init_mesh(data=config.data_degree, ring=config.ring, ulysses=config.ulysses)
            self.sp = SequenceSharding(mesh, config.layout, ring_impl=config.ring_impl)
            self.group = self.sp.world_group
            self.ranks = Ranks.apart()
        self.first = self.sp.data_rank == 0 and self.sp.rank == 0
        self.saver = Saver(config.async_save, self.ranks)
        self.lock: RunLock | None = None
        self._occupy()
        try:
            self._begin()
        except BaseException:
            self._release()
            raise

    def _occupy(self) -> None:
        """Take --out for this run, on a disk that all ranks share; refuse to spoil what is there."""
        config = self.config

        def take() -> None:
            self.lock = RunLock(config.out)
            if config.export != "never":
                checkpoint.check_replaceable(config.exported)

        try:
            self.ranks.first(take)
            checkpoint.check_shared(config.out, self.ranks)
        except BaseException:
            self._release()
            raise

    def _release(self) -> None:
        if self.lock is not None:
            self.lock.release()

    def _begin(self) -> None:
        """Open the inputs, build the model, and stand where the checkpoint stood."""
        config = self.config
        self.inputs = open_inputs(config, ranks=self.ranks)
        self.model, self.generation, self.autocast = self._load_model()
        self.optimizer = make_optimizer(self.model, config, self.sp.device)
        self.step = self.tokens = 0
        self.data_state: dict[str, Any] | None = None
        if self.inputs.resume is not None:
            checkpoint.load(self.inputs.resume, self.model, self.optimizer, self.ranks)
            state = self.inputs.resume.state
            self.step, self.tokens, self.data_state = self.inputs.resume.step, state["tokens"], state["data"]
        self.scheduler = make_scheduler(self.optimizer, config, self.step)
        self.saved_step = self.begun_step = self.started_step = self.step
        self.announced: Path | None = None
        self.sampler = CommunicationSampler(self.sp.device)
        self.seconds: list[float] = []  # of the steps since the last report
        self.lines_lost = 0

    def _load_model(self) -> tuple[Any, Any, bool]:
        """The sharded model, its generation config where it came with one, and whether it needs autocast."""
        config, sp = self.config, self.sp
        model = build_model(config, self.inputs.model_config)
        generation = model.generation_config if config.model else None
        sharded, bf16 = config.fsdp and sp.world_size > 1, config.dtype == "bf16"
        # Weights stay in fp32; FSDP casts what it gathers, and without FSDP autocast casts what needs it.
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 and sharded else None
        if not sharded:  # FSDP moves one layer at a time, so that no device ever holds the whole model
            model = model.to(sp.device)
        model = parallelize(model, sp, fsdp=config.fsdp, mp_policy=policy, kernel=config.kernel)
        return model, generation, bf16 and not sharded

    # --- the run

    def run(self) -> None:
        """Train up to `steps`, save and export.

        Raises:
            Stopped: if a signal reached any rank; all ranks have then saved the same step.
            LongspanError: if the ranks read different data, the loss is not finite any more, or the last save or the
                export cannot be written.
        """
        try:
            self._run()
        except BaseException as error:
            # All ranks come to such an error alike, so what is being written can become whole; otherwise a peer may be
            # gone.
            self.saver.abandon(600 if isinstance(error, LongspanError) else 10)
            raise
        finally:
            self._release()

    def _run(self) -> None:
        config = self.config
        display = Display(config.steps, self.step) if self.first else Quiet(config.steps)
        with StopRequest() as stop, display, self._log() as log:
            self._say_what(display)
            with self._batches() as batches:
                while self.step < config.steps:
                    batch = next(batches)
                    signum = self._agree(batch, stop.signum or 0)
                    if signum:
                        self._save(display, last=True)
                        display.say(f"stopped by a signal after step {self.step}; the same command goes on from there")
                        raise Stopped(signum)
                    self._announce(self.saver.written, display)
                    metrics = self._train_step(batch)
                    display.step(self.step, metrics)
                    if log is not None and metrics is not None:
                        self._write_line(log, metrics, display)
                    if config.save_every and self.step % config.save_every == 0:
                        self._save(display)
            self._save(display, last=True)
            if config.export == "end":
                with self._room_is_not_vital(display, last=True):
                    self._export(display)

    def _batches(self) -> contextlib.AbstractContextManager[Iterator[StepBatch]]:
        config = self.config
        steps = deal(
            iter(self.inputs.sequences(config.context)),
            batch=config.sequences,
            micro_batch=config.micro_batch,
            data_size=self.sp.data_size,
            data_rank=self.sp.data_rank,
            pack=config.pack,
        )
        return prefetch(steps)

    def _agree(self, batch: StepBatch, signum: int) -> int:
        """One small all-reduce before each step: whether any rank was told to stop, and whether all read the same.

        Returns:
            The signal, on every rank alike; 0 for none.
        """
        if self.group is None:
            return signum
        crc = batch.checksum
        said = torch.tensor([signum, crc, -crc], device=self.sp.device)
        dist.all_reduce(said, dist.ReduceOp.MAX, group=self.group)
        signum, largest, smallest = said.tolist()
        if largest != -smallest:
            raise LongspanError(
                f"the ranks read different data in step {self.step + 1}; every machine needs the same files in --data "
                f"{self.config.data}, and the same tokenizer"
            )
        return int(signum)

    def _say_what(self, display: Display) -> None:
        config, sp = self.config, self.sp
        weights = sum(p.numel() for p in self.model.parameters())
        display.say(
            f"{type(self.inputs.model_config).__name__.removesuffix('Config')}, {weights / 1e6:,.1f}M parameters; "
            f"{sp.world_size} {sp.device.type} ranks, data {sp.data_size} x {_spell_sequence(sp)}; {config.dtype}, "
            f"FSDP {'on' if config.fsdp else 'off'}; context {config.context:,}, batch {config.sequences} = "
            f"{config.sequences * config.context:,} tokens per step"
        )
        for problem in self.inputs.passed_over:
            display.say(f"warning: passed over a damaged checkpoint: {problem}")
        if self.step:
            display.say(f"going on after step {self.step}")

    # --- one step

    def _train_step(self, batch: StepBatch) -> StepMetrics | None:
        config = self.config
        reported = (self.step + 1) % config.log_every == 0 or self.step + 1 in (config.steps, self.started_step + 1)
        measured = reported and self.group is not None
        with self.sampler.measure() if measured else contextlib.nullcontext():
            start = time.perf_counter()
            loss, norm = self._update(batch)
            seconds = time.perf_counter() - start
        self.step += 1
        self.tokens += config.sequences * config.context
        self.data_state = batch.state
        self.seconds.append(seconds)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise LongspanError(
                f"loss {loss} and gradient norm {norm} at step {self.step}: the run has diverged; resume from a "
                f"checkpoint with a smaller --lr (now {config.lr}) or a longer --warmup (now {config.warmup})"
            )
        return self._report(batch, loss, norm) if reported else None

    def _update(self, batch: StepBatch) -> tuple[float, float]:
        """Forward, backward and optimizer; returns the loss and the norm of the gradients."""
        # Dropout then depends on the seed, the step and the rank alone, so a resumed run draws the same.
        rank = self.sp.data_rank * self.sp.size + self.sp.rank
        torch.manual_seed((self.config.seed << 40) + (self.step << 16) + rank)
        loss = torch.zeros((), device=self.sp.device)
        for micro in batch.micro_batches:
            inputs = {
                k: v.to(self.sp.device) if isinstance(v, Tensor) else v for k, v in shard_batch(micro, self.sp).items()
            }
            with torch.autocast(self.sp.device.type, torch.bfloat16, enabled=self.autocast):
                # Only the loss is kept: the output would hold the logits all through the backward.
                part = self.model(**inputs, num_items_in_batch=batch.label_tokens).loss
            part.backward()
            # Each is a sum over its own tokens of this replica and the others, over the labels of the whole step.
            loss += part.detach()
        norm = clip_gradients(self.model, self.config.clip)
        self.lr = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss.item(), norm

    def _report(self, batch: StepBatch, loss: float, norm: float) -> StepMetrics:
        sp, tokens = self.sp, self.config.sequences * self.config.context
        mean_s = sum(self.seconds) / len(self.seconds)
        self.seconds.clear()
        memory = peak_memory_gib(sp.device)
        communication = self.sampler.share
        if self.group is not None:
            most = torch.tensor(memory, device=sp.device)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
            share = torch.tensor(communication or 0.0, device=sp.device)
            dist.all_reduce(share, group=self.group)
            memory, communication = most.item(), share.item() / sp.world_size
        flops = model_flops(self.model, self.inputs.model_config, tokens, batch.attention_pairs)
        peak = peak_flops(sp.device, self.config.dtype)
        return StepMetrics(
            step=self.step,
            loss=loss,
            grad_norm=norm,
            lr=self.lr,
            tokens=self.tokens,
            tokens_per_s=tokens / mean_s,
            step_s=mean_s,
            communication=communication,
            peak_memory_gib=memory,
            mfu=flops / (mean_s * peak * sp.world_size) if flops and peak else None,
        )

    # --- what is written

    def _save(self, display: Display, *, last: bool = False) -> None:
        """Save, beside the training but for the last time, and with `--export saves` export."""
        config = self.config
        self._finish_save(display, last=last and self.begun_step == self.step)
        if self.saved_step == self.step:
            return
        state = {"data": self.data_state, "tokens": self.tokens, "identity": self.inputs.identity}
        self.saver.start(config.checkpoints, self.step, self.model, self.optimizer, state, keep=config.keep)
        self.begun_step = self.step
        if last or config.export == "saves":
            self._finish_save(display, last=last)
        if config.export == "saves" and self.saved_step == self.step:
            with self._room_is_not_vital(display, last):
                self._export(display)

    def _finish_save(self, display: Display, *, last: bool = False) -> None:
        """Wait for the save that is under way, if any."""
        with self._room_is_not_vital(display, last):
            path = self.saver.finish()
            if path is not None:
                self.saved_step = self.begun_step
                self._announce(path, display)

    def _announce(self, path: Path | None, display: Display) -> None:
        if path is not None and path != self.announced:
            self.announced = path
            display.say(f"saved {path}")

    @contextlib.contextmanager
    def _room_is_not_vital(self, display: Display, last: bool) -> Iterator[None]:
        """A disk that is full ends the run only where it is the last save."""
        try:
            yield
        except DiskFull as error:
            if last:
                raise LongspanError(
                    f"{error}; make room, then the same command goes on from {self._saved()}"
                ) from error
            display.say(f"warning: {error}; the run goes on, {self._saved()} is kept, and the next save tries again")

    def _saved(self) -> str:
        return f"step {self.saved_step}" if self.saved_step else "the beginning"

    def _export(self, display: Display) -> None:
        path = self.config.exported
        dtype = _DTYPES[self.config.dtype]
        inputs = self.inputs
        checkpoint.export(
            path, self.model, inputs.model_config, inputs.tokenizer, dtype, self.generation, ranks=self.ranks
        )
        display.say(f"exported {path}")

    def _write_line(self, log: MetricsLog, metrics: StepMetrics, display: Display) -> None:
        try:
            log.write(metrics)
        except OSError as error:
            if not is_full(error):
                raise
            if not self.lines_lost:
                free = shutil.disk_usage(self.config.out).free
                display.say(
                    f"warning: {log.path} cannot be written: {error.strerror} ({free:,} bytes free); the run goes on, "
                    "steps are missing there until there is room"
                )
            self.lines_lost += 1

    @contextlib.contextmanager
    def _log(self) -> Iterator[MetricsLog | None]:
        if not self.first:
            yield None
            return
        try:
            log = MetricsLog(self.config.out, self.step)
        except OSError as error:
            raise LongspanError(f"the metrics of --out {self.config.out} cannot be written: {error}") from error
        try:
            yield log
        finally:
            log.close()


def _spell_sequence(sp: SequenceSharding) -> str:
    """The ranks that share a sequence, and with a ring how."""
    if sp.ring_size == 1:
        return f"ulysses {sp.ulysses_size}"
    return f"ring {sp.ring_size} x ulysses {sp.ulysses_size} ({sp.layout.kind}, {sp.ring_impl})"


@contextlib.contextmanager
def _gloo_is_quiet() -> Iterator[None]:
    """Gloo greets on stdout, from C++, whenever a group is made."""
    sys.stdout.flush()
    stdout, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(nowhere)
