"""The training loop of one rank."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import math
import os
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from longspan import checkpoint
from longspan.checkpoint.identity import flat
from longspan.comm.consistency import host_group
from longspan.comm.mesh import SequenceSharding, make_sharding
from longspan.compat.torch_api import gather_into
from longspan.compat.torchao_api import check_torchao
from longspan.core.accumulation import sums_once
from longspan.core.errors import LongspanError
from longspan.core.rank_differences import format_ranks
from longspan.data import ROUNDS_AHEAD, StepBatch, deal, prefetch, rounds, together
from longspan.hf.batch import shard_batch
from longspan.hf.checks.nonfinite import watch
from longspan.hf.loading import load_sharded
from longspan.hf.memory_auto import device_memory
from longspan.hf.state import state_of
from longspan.hf.weights.gradients import no_sync
from longspan.hf.weights.optimizer_in_backward import optimizer_in_backward
from longspan.hf.weights.shard_slices import tensor_parts
from longspan.ranks import agreement
from longspan.ranks.heartbeat import Heartbeat
from longspan.ranks.launch import Stopped, StopRequest
from longspan.ranks.rendezvous import GROUP_TIMEOUT_S, Peers, wait_for_ranks
from longspan.tracing.files import gather_trace, write_timeline
from longspan.tracing.record import Recorder
from longspan.tracing.spans import read_trace
from longspan.tracing.timeline import summary_lines
from longspan.train.config import TrainConfig
from longspan.train.health import Health
from longspan.train.identity import changed_settings, settings_of
from longspan.train.inputs import Inputs, find_resume, finished, model_origin, open_here, prepare_model
from longspan.train.metrics import (
    CommunicationSampler,
    Display,
    Quiet,
    StepMetrics,
    model_flops,
    peak_flops,
    peak_memory,
)
from longspan.train.optimizer import clip_gradients, make_optimizer, make_scheduler
from longspan.train.outputs import Outputs
from longspan.train.summary import what_runs


class Trainer:
    """Everything one rank holds while it trains. Every rank makes one, in the same order.

    Args:
        config: what to train.
        heartbeat: tells the other ranks where this one is; without one, nobody is told.

    Raises:
        LongspanError: for what `open_inputs` refuses, ranks that were started differently, a model that cannot be
            sharded, or another model's checkpoint.
    """

    def __init__(self, config: TrainConfig, heartbeat: Heartbeat | None = None) -> None:
        self.config, self._heart = config, heartbeat
        if config.deterministic:
            be_deterministic()
        self._at("start", long=True)
        self.inputs = self._agreed_inputs(
            wait_for_ranks(config.timeout, config.start_timeout) if heartbeat is None else heartbeat.peers
        )
        with _gloo_is_quiet():
            self.sp = make_sharding(config.parallel)
            self.group = self.sp.mesh_group
            # Ranks wait on the host for one that reads long: no NCCL communicator gives up over it.
            self.hosts = None if self.group is None else host_group(self.sp, GROUP_TIMEOUT_S)
            self.outputs = Outputs(config)
        self.first = self.sp.data_rank == self.sp.rank == self.sp.tensor_rank == 0
        try:
            self._begin()
        except BaseException:
            self.outputs.release()
            raise

    def _agreed_inputs(self, peers: Peers) -> Inputs:
        """What the run is made from, once it is known to be alike on every rank; then the process group."""
        config, alive = self.config, self._heart is not None
        with agreement.refusing_together(peers, alive=alive):
            inputs = open_here(config)
        facts = {
            **agreement.settings(config),
            **agreement.versions(),
            **agreement.model_facts(inputs.model_config),
            **{key: value for key, value in flat(inputs.identity).items() if not key.startswith("model.")},
        }
        if config.optimizer.optimizer == "adamw8bit":
            facts["torchao"] = check_torchao()
        agreement.agree(peers, facts, alive=alive)
        peers.init_process_group("cuda" if torch.cuda.is_available() else "cpu")
        return inputs

    def _begin(self) -> None:
        """Find the checkpoint to go on from, build the model, and stand where the checkpoint stood."""
        config = self.config
        self._at("loading", long=True)
        self.inputs = find_resume(config, self.inputs, self.outputs.ranks)
        self.finished: str | None = self.outputs.ranks.first(lambda: finished(config, self.inputs))
        if self.finished is not None:
            return
        self.model, self.generation, self.autocast = self._load_model()
        self.optimizer = make_optimizer(self.model, config, self.sp.device)
        self.step = self.tokens = 0
        self.data_state: dict[str, Any] | None = None
        if self.inputs.resume is not None:
            checkpoint.load(self.inputs.resume, self.model, self.optimizer, self.outputs.ranks)
            state = self.inputs.resume.state
            self.step, self.tokens, self.data_state = self.inputs.resume.step, state["tokens"], state["data"]
        self.scheduler = make_scheduler(self.optimizer, config, self.step)
        self.started_step = self.step
        self.outputs.begin(self.step)
        self.sampler = CommunicationSampler(self.sp.device)
        self.seconds: list[float] = []  # of the steps since the last report
        self.health = Health(config)
        self.sums_once = self._sums_once()
        in_backward = config.optimizer.optimizer_in_backward
        self.in_backward = optimizer_in_backward(self.model, self.optimizer) if in_backward else None

    def _at(self, phase: str, step: int | None = None, *, long: bool = False) -> None:
        """Tell the other ranks where this one is."""
        if self._heart is not None:
            self._heart.at(phase, step, long=long)

    def _load_model(self) -> tuple[Any, Any, bool]:
        """The sharded model, its generation config where it came with one, and whether it needs autocast."""
        config, sp = self.config, self.sp
        sharded = sp.shards_weights(fsdp=config.fsdp, cpu_offload=config.memory.cpu_offload)
        bf16 = config.dtype == "bf16"
        # Weights stay in fp32; FSDP casts what it gathers, and without FSDP autocast casts what needs it.
        summed = torch.bfloat16 if config.optimizer.grad_dtype == "bf16" else torch.float32
        plain = not bf16 and config.optimizer.grad_dtype == "fp32"
        policy = None if plain or not sharded else MixedPrecisionPolicy(torch.bfloat16 if bf16 else None, summed)
        model = load_sharded(
            model_origin(config, self.inputs.model_config),
            sp,
            prepare=prepare_model,
            later=self.inputs.resume is not None,
            fsdp=config.fsdp,
            mp_policy=policy,
            kernel=config.model.kernel,
            memory=config.memory.to_memory(),
            tensor_style=config.parallel.tensor_style,
            check_weights=config.logging.check_weights,
            check_at_rest=config.logging.check_at_rest,
        )
        generation = model.generation_config if config.model.model else None
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
            if self.finished is None:
                self._run()
            elif self.first:
                print(self.finished, flush=True)
        except BaseException as error:
            # All ranks come to such an error alike, so what is being written can become whole; otherwise a peer may be
            # gone.
            self._at("finishing the save that is under way", self.step, long=True)
            self.outputs.abandon(600 if isinstance(error, LongspanError) else 10)
            raise
        finally:
            self.outputs.release()

    def _run(self) -> None:
        config = self.config
        display = Display(config.steps, self.step) if self.first else Quiet(config.steps)
        say, outputs = display.say, self.outputs
        with display, outputs.metrics(self.first, self.step) as log:
            # Until here, and from the last save on, nothing is lost by a signal: it ends the rank at once.
            with StopRequest(stops="stopping after this step", grace_s=config.grace) as stop:
                self._say_what(display)
                with self._batches() as batches:
                    while self.step < config.steps:
                        self._at("data", self.step + 1, long=True)
                        batch = next(batches)
                        self._at("comparing batches", self.step + 1)
                        signum = self._agree(batch, stop.signum or 0)
                        if signum:
                            self._save(say, last=True)
                            say(f"stopped by a signal after step {self.step}; the same command goes on from there")
                            raise Stopped(signum)
                        outputs.announce(say)
                        metrics = self._train_step(batch, say)
                        display.step(self.step, metrics)
                        outputs.write_line(log, metrics, say)
                        if config.checkpoint.save_every and self.step % config.checkpoint.save_every == 0:
                            self._save(say)
                self._save(say, last=True)
                if stop.signum:
                    raise Stopped(stop.signum)
            if config.checkpoint.export == "end":
                self._export(say, last=True)

    def _save(self, say: Callable[[str], None], *, last: bool = False) -> None:
        """Save, and with `--export saves` export."""
        self._at("save", self.step, long=True)
        state = {
            "data": self.data_state,
            "tokens": self.tokens,
            "identity": self.inputs.identity,
            "settings": settings_of(self.config),
        }
        whole = self.outputs.save(self.step, self.model, self.optimizer, state, say, last=last)
        if whole and self.config.checkpoint.export == "saves":
            self._export(say, last=last)

    def _export(self, say: Callable[[str], None], *, last: bool) -> None:
        self._at("export", self.step, long=True)
        self.outputs.export(self.step, self.model, self.inputs, self.generation, say, last=last)

    @contextlib.contextmanager
    def _batches(self) -> Iterator[Iterator[StepBatch]]:
        """The steps' batches, read and tokenised ahead in a thread; several ranks each tokenise their share."""
        config, stream = self.config, self.inputs.sequences(self.config.tokens)
        dealt = functools.partial(
            deal,
            batch=config.sequences,
            micro_batch=config.micro_batch,
            data_size=self.sp.data_size,
            data_rank=self.sp.data_rank,
            pack=config.data.pack,
        )
        if self.hosts is None:
            with prefetch(map(self._cut, dealt(iter(stream)))) as batches:
                yield batches
            return
        size, rank = self.sp.job_size, dist.get_rank(self.hosts)
        own = rounds(stream, config.sequences * config.tokens, size, rank)
        with prefetch(own, depth=ROUNDS_AHEAD) as ahead:
            # Only this thread speaks with the other ranks. What it has of a whole sequence is gone before the step.
            yield map(self._cut, dealt(stream.pack(together(ahead, self.hosts, self._refuse_data))))

    def _refuse_data(self, unlike: list[int]) -> NoReturn:
        raise LongspanError(
            f"the ranks read different data in step {self.step + 1}; every machine needs the same files in --data "
            f"{self.config.data.data}, and the same tokenizer; unlike the others: {format_ranks(unlike)}"
        )

    def _cut(self, step: StepBatch) -> StepBatch:
        """Of each micro-batch this rank's tokens; the finder of what is not finite takes them again."""
        return dataclasses.replace(step, micro_batches=[shard_batch(micro, self.sp) for micro in step.micro_batches])

    def _agree(self, batch: StepBatch, signum: int) -> int:
        """One small all-reduce before each step: whether any rank was told to stop, and whether all read the same.

        Returns:
            The signal, on every rank alike; 0 for none.
        """
        if self.group is None:
            return signum
        crc = zlib.crc32(f"{self.step} {batch.checksum} {batch.label_tokens} {len(batch.micro_batches)}".encode())
        said = torch.tensor([signum, crc, -crc])
        dist.all_reduce(said, dist.ReduceOp.MAX, group=self.hosts)
        signum, largest, smallest = said.tolist()
        if largest != -smallest:
            every = torch.zeros(self.sp.job_size, dtype=said.dtype)
            assert self.hosts is not None
            gather_into(every, torch.tensor([crc]), self.hosts)
            read = every.tolist()
            usual = statistics.mode(read)
            self._refuse_data([rank for rank, crc in enumerate(read) if crc != usual])
        return int(signum)

    def _say_what(self, display: Display) -> None:
        weights = sum(p.numel() for p in self.model.parameters())
        sp = self.sp
        for line in what_runs(self.config, self.inputs, weights, sp.device.type, _spell_sequence(sp)):
            display.say(line)
        if self.step:
            display.say(f"going on after step {self.step}")
        if self.config.logging.profile is not None and self.config.logging.profile <= self.step:
            display.say(f"--profile {self.config.logging.profile} is a step that was done before: nothing is recorded")
        if self.inputs.resume is not None and (said := changed_settings(self.inputs.resume, self.config)):
            display.say(said)

    # --- one step

    def _train_step(self, batch: StepBatch, say: Callable[[str], None]) -> StepMetrics | None:
        config = self.config
        reported = (self.step + 1) % config.logging.log_every == 0 or self.step + 1 in (
            config.steps,
            self.started_step + 1,
        )
        recorder = Recorder(self.sp.device) if self.step + 1 == config.logging.profile else None
        measured = reported and self.group is not None and recorder is None  # one profiler at a time
        recording = self.sampler.measure() if measured else contextlib.nullcontext()
        with recording if recorder is None else recorder.step(self._wait):
            start = time.perf_counter()
            loss, norm = self._update(batch)
            seconds = time.perf_counter() - start
        if recorder is not None:
            self._write_timeline(recorder, say)
        self.step += 1
        self.tokens += config.sequences * config.tokens
        self.data_state = batch.state
        self.seconds.append(seconds)
        warning = self.health.look(self.step, loss, norm)
        if warning is not None:
            say(warning)
        return self._report(batch, loss, norm) if reported else None

    def _wait(self) -> None:
        """For all ranks, so that their steps begin together in the trace."""
        if self.hosts is not None:
            dist.barrier(group=self.hosts)

    def _write_timeline(self, recorder: Recorder, say: Callable[[str], None]) -> None:
        self._at("gathering the trace", self.step + 1, long=True)
        events = gather_trace(recorder.events, self.hosts)
        if not self.first:
            return
        stem = self.config.out / "profile" / f"step-{self.step + 1}"
        title = (
            f"step {self.step + 1}: {self.config.parallel.flags}, {self.config.tokens:,} tokens, {self.config.dtype}"
        )
        try:
            with io.StringIO() as said:
                write_timeline(events, stem, title, said)
                text = said.getvalue()
        except LongspanError as error:  # what a disk has no room for ends no run
            text = f"{error}; going on without it"
        for line in [*text.splitlines(), *summary_lines(read_trace(events))]:
            say(line)

    def _update(self, batch: StepBatch) -> tuple[float, float]:
        """Forward, backward and optimizer; returns the loss and the norm of the gradients.

        Raises:
            LongspanError: if either is not finite; the optimizer has not stepped then, but where it does in the
                backward, and the loss was finite.
        """
        self.lr = float(self.optimizer.param_groups[0]["lr"])
        loss = self._accumulate(batch)
        self._at("optimizer", self.step + 1)
        value = loss.item()
        if self.in_backward is None:
            norm = clip_gradients(self.model, self.config.optimizer.clip)
        else:
            norm = self.in_backward.grad_norm() if math.isfinite(value) else math.nan
            if math.isfinite(value) and not math.isfinite(norm):
                raise LongspanError(self.health.say_updated(self.step + 1, value, norm))
        if not (math.isfinite(value) and math.isfinite(norm)):
            self.optimizer.zero_grad()
            self._at("looking for what is not finite", self.step + 1, long=True)
            found = watch(self.model, self.sp, lambda: self._accumulate(batch))
            raise LongspanError(self.health.say_nonfinite(self.step + 1, value, norm, found, self.started_step))
        self.optimizer.step()  # of nothing, where each weight's was made in the backward
        self.scheduler.step()
        self.optimizer.zero_grad()
        return value, norm

    def _accumulate(self, batch: StepBatch) -> Tensor:
        """Forward and backward of all micro-batches; returns the loss of the step. Twice the same, if done twice."""
        # Dropout then depends on the seed, the step and the rank alone, so a resumed run draws the same.
        rank = self.sp.data_rank * self.sp.size + self.sp.rank
        torch.manual_seed(step_seed(self.config.seed, self.step, rank))
        loss = torch.zeros((), device=self.sp.device)
        last = len(batch.micro_batches) - 1
        for i, micro in enumerate(batch.micro_batches):
            self._at("forward and backward", self.step + 1)
            inputs = {k: v.to(self.sp.device) if isinstance(v, Tensor) else v for k, v in micro.items()}
            with no_sync(self.model) if self.sums_once and i < last else contextlib.nullcontext():
                with torch.autocast(self.sp.device.type, torch.bfloat16, enabled=self.autocast):
                    # Only the loss is kept: the output would hold the logits all through the backward.
                    part: Tensor = self.model(**inputs, num_items_in_batch=batch.label_tokens).loss
                if self.in_backward is not None and self.in_backward.active and not part.isfinite():
                    return part.detach()  # it is the same on every rank; a backward would spoil the weights
                part.backward()
            # Each is a sum over its own tokens of this replica and the others, over the labels of the whole step.
            loss += part.detach()
        return loss

    def _sums_once(self) -> bool:
        """Whether gradients are summed over the ranks after the last micro-batch alone; alike on all ranks."""
        config, sp = self.config, self.sp
        if config.optimizer.reduce != "auto" or self.group is None:
            return config.optimizer.reduce != "each"
        width = 2 if config.optimizer.grad_dtype == "bf16" else 4  # what waits for its sum is in the sum's dtype
        whole = sum(p.numel() // tensor_parts(p) for p in self.model.parameters() if p.requires_grad) * width
        sharded = config.fsdp and sp.world_size > 1
        once = torch.tensor(sums_once(sharded, whole, device_memory(sp.device)), device=sp.device, dtype=torch.int32)
        dist.all_reduce(once, dist.ReduceOp.MIN, group=self.group)
        return bool(once)

    def _report(self, batch: StepBatch, loss: float, norm: float) -> StepMetrics:
        sp, tokens = self.sp, self.config.sequences * self.config.tokens
        mean_s = sum(self.seconds) / len(self.seconds)
        offload = offload_metrics(self.model, sum(self.seconds))
        self.seconds.clear()
        memory = peak_memory(sp.device)
        communication = self.sampler.share
        if self.group is not None:
            most = torch.tensor(memory, device=sp.device)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
            share = torch.tensor(communication or 0.0, device=sp.device)
            dist.all_reduce(share, group=self.group)
            memory, communication = most.tolist(), share.item() / sp.job_size
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
            peak_memory_gib=memory[0],
            peak_reserved_gib=memory[1] or None,
            reserved_ratio=memory[2] or None,
            mfu=flops / (mean_s * peak * sp.job_size) if flops and peak else None,
            **offload,
        )


def offload_metrics(model: Any, seconds: float) -> dict[str, float | None]:
    """What this rank's offload moved since this was asked last: `StepMetrics`' part of it, nothing without one."""
    store = state_of(model).memory.store
    if store is None:
        return {}
    found = store.metrics()
    store.reset()
    moving = found["seconds_out"] + found["seconds_in"]
    waited = found["waited_seconds_out"] + found["waited_seconds_in"]
    return {
        "offload_gb_per_s": (found["bytes_out"] + found["bytes_in"]) / moving / 1e9 if moving else 0.0,
        "offload_waited": waited / seconds,
    }


def be_deterministic() -> None:
    """Have torch take kernels alone that give the same bits every time, or raise where it has none.

    Of this process, before any CUDA call: cuBLAS reads its variable when it starts. Attention's backward then adds up
    dQ in a fixed order too.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    options: Any = torch.utils.deterministic
    options.fill_uninitialized_memory = False  # nothing reads what it has not written
    torch.backends.cudnn.benchmark = False


def step_seed(seed: int, step: int, rank: int) -> int:
    """The seed of one rank's step, 64 bits, well mixed: whatever the three are, no two of them share a stream."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=8).digest())


def _spell_sequence(sp: SequenceSharding) -> str:
    """The ranks that share a sequence, and with a ring how."""
    tensor = f" x tensor {sp.tensor_size}" if sp.tensor_size > 1 else ""
    if sp.ring_size == 1:
        return f"ulysses {sp.ulysses_size}{tensor}"
    return f"ring {sp.ring_size} x ulysses {sp.ulysses_size}{tensor} ({sp.layout.kind}, {sp.ring_impl})"


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
