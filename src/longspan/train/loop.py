"""The training loop of one rank."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import math
import os
import time
import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from longspan import checkpoint
from longspan.checkpoint.identity import flat
from longspan.comm.consistency import gather_numbers
from longspan.comm.mesh import make_sharding
from longspan.comm.objects import on_every_rank
from longspan.compat.torch_checkpoint import LOW_BIT, check_torchao
from longspan.core.errors import LongspanError
from longspan.core.tile_sizes import reduces_once
from longspan.core.validation import write_file
from longspan.data import Sequence, StepBatch, check_same_text, deal, prefetch, shared_sequences
from longspan.data.elastic import Elastic, Sample
from longspan.hf.batch import IGNORE, shard_batch
from longspan.hf.checks.nonfinite import watch
from longspan.hf.loading import load_sharded
from longspan.hf.memory_options import compile_layers
from longspan.hf.planning import device_memory, shape_of
from longspan.hf.state import state_of
from longspan.hf.support import layers_without_backward, transformers_model
from longspan.hf.weights.gradients import no_sync, optimizer_in_backward
from longspan.hf.weights.quantized import number_of_weights
from longspan.hf.weights.sources import tensor_parts
from longspan.ranks import agreement
from longspan.ranks.launch import Stopped, StopRequest, stdout_to_stderr
from longspan.ranks.watch import Watch
from longspan.tracing.record import Recorder, gather_trace
from longspan.tracing.spans import read_trace, summary_lines
from longspan.train.config import TrainConfig
from longspan.train.evaluation import Evaluator
from longspan.train.inputs import (
    Inputs,
    changed_settings,
    find_resume,
    finished,
    model_origin,
    open_local,
    settings_of,
    step_to_export,
    stopped_early,
)
from longspan.train.job import run_summary
from longspan.train.metrics import (
    CommunicationSampler,
    Display,
    Health,
    StepMetrics,
    model_flops,
    peak_flops,
    peak_memory,
)
from longspan.train.old_resolve import length_of, reference_bytes
from longspan.train.optimizer import clip_gradients, frozen, initialise, make_optimizer, make_scheduler, tuned
from longspan.train.outputs import Outputs
from longspan.train.preferences import Preferences


class Trainer:
    """One rank of a training run. Every rank makes one. All methods are collective.

    `watch` reports this rank's phase; without one, nothing watches the ranks.
    """

    def __init__(self, config: TrainConfig, watch: Watch | None = None) -> None:
        self.config = config
        watch = watch or Watch()
        self._at = watch.at
        if config.deterministic:
            be_deterministic()
        self.inputs = agreement.open_together(lambda: open_local(config), self._facts)
        with stdout_to_stderr(discard=True):  # gloo greets there
            self.sp = make_sharding(config.parallel)
            self.group = self.sp.mesh_group
            self.cpu_group = self.sp.host_group
            self.first = self.sp.data_rank == self.sp.rank == self.sp.tensor_rank == 0
            self.display = Display(config.last_step, enabled=self.first)
            self.outputs = Outputs(config, self.display.log)
        try:
            self._begin()
        except BaseException:
            self.outputs.release()
            raise

    def _facts(self, inputs: Inputs) -> dict[str, Any]:
        facts = {
            **agreement.settings(self.config),
            **agreement.model_facts(inputs.model_config),
            **{key: value for key, value in flat(inputs.identity).items() if not key.startswith("model.")},
        }
        if (optimizer := self.config.optimizer.optimizer) in LOW_BIT:
            facts["torchao"] = check_torchao(optimizer)
        return facts

    def _begin(self) -> None:
        """Build the model, and load the checkpoint to resume from, if any."""
        config = self.config
        self._at("loading", unlimited=True)
        self.inputs = find_resume(config, self.inputs, self.outputs.ranks)
        self.finished: str | None = self.outputs.ranks.first(lambda: finished(config, self.inputs))
        if self.finished is not None:
            return
        self.model, self.autocast = self._load_model()
        self.preferences = None
        if config.data.dpo is not None:
            reference = self._load_model(reference=True)[0] if config.tuning.lora is None else None
            self.preferences = Preferences(self.model, reference, self.sp, config.data.dpo)
        self.generation_config = self.model.generation_config if config.model.model else None
        self.elastic: Elastic | None = None
        if config.data.elastic:
            room = -(-config.context_tokens // self.sp.size)
            self.elastic = Elastic(self.sp, self.model, room, config.data.gpu)
        self.optimizer = make_optimizer(self.model, config, self.sp.device)
        self.step = self.tokens = 0
        self.data_state: dict[str, Any] | None = None
        if self.inputs.resume is not None:
            checkpoint.load(self.inputs.resume, self.model, self.optimizer, self.outputs.ranks)
            state = self.inputs.resume.state
            self.step, self.tokens, self.data_state = self.inputs.resume.step, state["tokens"], state["data"]
        elif self.inputs.processor is not None:
            initialise(self.model, self.optimizer)
        self.scheduler = make_scheduler(self.optimizer, config, self.step)
        self.started_step = self.step
        self.outputs.begin(self.step)
        self.sampler = CommunicationSampler(self.sp.device)
        self.seconds: list[float] = []  # of the steps since the last report
        self.shape = None
        with contextlib.suppress(LongspanError):
            self.shape = shape_of(self.inputs.model_config)
        self.counted: list[tuple[int, int, int]] = []  # of the same steps: tokens, with padding, attention pairs
        self.health = Health(config)
        self.evaluator = Evaluator(config, self.inputs, self.sp, self._at, self.preferences, self.autocast)
        self.outputs.ranks.first(self._check_best)
        self.reduce_last = self._reduces_last()
        in_backward = config.optimizer.optimizer_in_backward
        self.in_backward = optimizer_in_backward(self.model, self.optimizer) if in_backward else None

    def _load_model(self, *, reference: bool = False) -> tuple[Any, bool]:
        """Return the sharded model, and whether its forward needs autocast.

        The `reference` is frozen, and as it was before training.
        """
        config, sp = self.config, self.sp
        sharded = sp.shards_weights(fsdp=config.fsdp, cpu_offload=config.memory.cpu_offload)
        bf16 = config.dtype == "bf16"
        # Weights stay in fp32: FSDP casts what it gathers; without FSDP autocast casts the inputs of each product.
        reduce_dtype = torch.bfloat16 if config.optimizer.grad_dtype == "bf16" else torch.float32
        mixed = sharded and (bf16 or reduce_dtype == torch.bfloat16)
        origin = model_origin(config, self.inputs.model_config)
        if reference and sharded and bf16:  # FSDP would cast it each time
            origin = dataclasses.replace(origin, dtype=torch.bfloat16)
        images = self.inputs.processor is not None
        model = load_sharded(
            origin,
            sp,
            prepare=frozen
            if reference
            else lambda model: tuned(model, config.tuning, config.seed, config.model.adapter, images=images),
            whole=config.tuning.dora,
            later=self.inputs.resume is not None and not reference and config.tuning.quantize == "none",
            fsdp=config.fsdp,
            mp_policy=MixedPrecisionPolicy(torch.bfloat16 if bf16 else None, reduce_dtype) if mixed else None,
            kernel=config.model.kernel,
            memory=config.memory.to_memory(),
            tensor_style=config.parallel.tensor_style,
            experts=config.parallel.experts,
            check_weights=config.logging.check_weights,
            check_at_rest=config.logging.check_at_rest,
        )
        if config.compile:
            compile_layers(model)
        return model, bf16 and not sharded

    # --- the run

    def run(self) -> None:
        """Train up to `steps`, save and export. Raise `Stopped` if a signal reached any rank, after all have saved."""
        try:
            if self.finished is None:
                self._run()
            else:
                self.display.log(self.finished)
        except BaseException as error:
            # All ranks raise a LongspanError, so a save in progress can complete. After another error, a peer may be
            # gone.
            self._at("finishing the save in progress", unlimited=True)
            self.outputs.abandon(600 if isinstance(error, LongspanError) else 10)
            raise
        finally:
            self.outputs.release()

    def _run(self) -> None:
        config, save_every = self.config, self.config.checkpoint.save_every
        self.log = self.outputs.open_log(self.step) if self.first else None
        with self.display.live(self.step):
            # Before this and after the last save, nothing is lost by a signal: it ends the rank at once.
            with StopRequest("stopping after this step") as stop:
                self._log_start()
                if self.step == 0 and self.evaluator.active:
                    self._evaluate()
                with self._batches() as batches:
                    while self.step < config.last_step and not self._stopped_early():
                        self._at("data", self.step + 1, unlimited=True)
                        batch = next(batches)
                        self._at("comparing batches", self.step + 1)
                        signum = self._agree(batch, stop.signum or 0)
                        if signum:
                            self._save(last=True)
                            self.display.log(
                                f"stopped by a signal after step {self.step}; run the same command again to resume"
                            )
                            raise Stopped(signum)
                        self.outputs.announce()
                        metrics = self._train_step(batch)
                        self.display.step(self.step, metrics)
                        if self.log is not None and metrics is not None:
                            self.log.write(metrics)
                        best = self.evaluator.due(self.step) and self._evaluate()
                        if (save_every and self.step % save_every == 0) or (best and config.evaluation.keep_best):
                            self._save()
                if self._stopped_early():
                    self._log_stop()
                self._save(last=True)
                if stop.signum:
                    raise Stopped(stop.signum)
            if config.checkpoint.export in ("end", "best"):
                self._export(self._load_best(), last=True)

    def _evaluate(self) -> bool:
        """Evaluate, and return whether the loss is the lowest so far."""
        evaluated = self.evaluator(self.model, self.step)
        for line in evaluated.lines():
            self.display.log(line)
        if self.log is not None:
            self.log.write_evaluation(evaluated)
        return evaluated.best

    @functools.cached_property
    def trained(self) -> float:
        """The share of weights that are trained."""
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        return float(trained / number_of_weights(self.model))

    @functools.cached_property
    def without_backward(self) -> int:
        """The first layers, which have no backward."""
        return layers_without_backward(transformers_model(self.model))

    def _stopped_early(self) -> bool:
        return stopped_early(self.config, dataclasses.asdict(self.evaluator.progress))

    def _log_stop(self) -> None:
        found = self.evaluator.progress
        lower = "finite loss" if found.best is None else f"lower loss than {found.best:.4f} of step {found.step}"
        self.display.log(
            f"stopped after step {self.step}: {found.since} evaluations without a {lower} "
            f"(--patience {self.config.evaluation.patience})"
        )

    def _save(self, *, last: bool = False) -> None:
        self._at("save", self.step, unlimited=True)
        state = {
            "data": self.data_state,
            "tokens": self.tokens,
            "identity": self.inputs.identity,
            "settings": settings_of(self.config),
            "length": length_of(self.config),
            "evaluation": dataclasses.asdict(self.evaluator.progress),
        }
        best = self.evaluator.progress.step if self.config.evaluation.keep_best else None
        complete = self.outputs.save(self.step, self.model, self.optimizer, state, best=best, last=last)
        if complete and self.config.checkpoint.export == "saves":
            self._export(self.step, last=last)

    def _load_best(self) -> int:
        """Load the weights to export at the end, if they are those of an earlier step; return their step."""
        step = step_to_export(self.config, self.step, dataclasses.asdict(self.evaluator.progress))
        if step != self.step:
            self._at("loading the best checkpoint", self.step, unlimited=True)
            path = checkpoint.step_path(self.config.checkpoints, step)
            checkpoint.load(path, self.model, self.optimizer, self.outputs.ranks)
        if self.config.checkpoint.export == "best":
            why = "had the lowest" if self.evaluator.progress.step else "is the last: none had a lower"
            self.display.log(f"exporting step {step}, which {why} evaluation loss")
        return step

    def _check_best(self) -> None:
        """Raise if the run resumes in another folder, which lacks the checkpoint that it may have to export."""
        best, folder = self.evaluator.progress.step, self.config.checkpoints
        if self.config.checkpoint.export == "best" and best and best not in checkpoint.complete_steps(folder):
            raise LongspanError(
                f"--export best: the evaluation loss was lowest at step {best}, whose checkpoint is not in {folder}; "
                "copy it there, or give --export end"
            )

    def _export(self, step: int, *, last: bool) -> None:
        self._at("export", self.step, unlimited=True)
        self.outputs.export(step, self.model, self.inputs, self.generation_config, last=last)

    def _log_start(self) -> None:
        """Log what runs, and how it differs from the run that it resumes."""
        config, resume, log = self.config, self.inputs.resume, self.display.log
        weights = number_of_weights(self.model)
        for line in run_summary(config, self.inputs, weights, self.sp.device):
            log(line)
        if not config.tuning.trains_all:
            log(f"trained: {round(self.trained * weights):,} of {weights:,} weights")
        if self.preferences is not None:
            copy, size = self.preferences.reference, f"{reference_bytes(config, weights) / 1e9:.2f} GB"
            log("reference: " + ("the model without LoRA" if copy is None else f"a frozen copy, {size} on each rank"))
        if resume is None:
            return
        log(f"resuming after step {self.step}")
        if config.logging.profile is not None and config.logging.profile <= self.step:
            log(f"--profile {config.logging.profile} is a step that was done before: nothing is recorded")
        if changed := changed_settings(resume, config):
            log(changed)

    # --- batches

    @contextlib.contextmanager
    def _batches(self) -> Iterator[Iterator[StepBatch]]:
        """Yield the steps' batches, read and tokenised ahead in a thread, which the ranks share."""
        config, stream = self.config, self.inputs.sequences(self.config.context_tokens)
        with shared_sequences(stream, config.sequences * config.context_tokens, self.cpu_group) as sequences:
            steps = deal(
                sequences,
                batch=config.sequences,
                micro_batch=config.micro_batch,
                data_size=self.sp.data_size,
                data_rank=self.sp.data_rank,
                pack=self.inputs.pack,
                context=config.context_tokens,
                images=self.inputs.images,
                split=self._rounds if config.data.elastic else None,
            )
            if self.cpu_group is None:
                with prefetch(map(self._sharded, steps)) as batches:
                    yield batches
                return
            # Collectives run in this thread only. No full sequence is held during the step.
            if self.inputs.processor is not None:  # a rank may fail alone to read an image
                steps = iter(functools.partial(on_every_rank, steps.__next__, self.cpu_group), None)
            yield map(self._sharded, steps)

    def _rounds(self, sequences: list[Sequence]) -> list[dict[str, Any]]:
        """Return this rank's rounds of a step."""
        assert self.elastic is not None
        samples = []
        for sequence in sequences:
            ids = torch.from_numpy(sequence.ids)
            labels = ids if sequence.trained is None else ids.where(torch.from_numpy(sequence.trained), IGNORE)
            samples.append(Sample(ids, labels))
        batches = self.elastic.step(samples).batches
        return [{key: x for key, x in batch.items() if key != "num_items_in_batch"} for batch in batches]

    def _sharded(self, step: StepBatch) -> StepBatch:
        if self.inputs.processor is not None:  # the model cuts batches with images
            return step
        return dataclasses.replace(step, micro_batches=[shard_batch(micro, self.sp) for micro in step.micro_batches])

    def _agree(self, batch: StepBatch, signum: int) -> int:
        """Compare the ranks' batches before a step, and return a signal that reached any rank; 0 for none."""
        if self.cpu_group is None:
            return signum
        crc = zlib.crc32(f"{self.step} {batch.checksum} {batch.label_tokens} {len(batch.micro_batches)}".encode())
        signums, checksums = zip(*gather_numbers([signum, crc], self.cpu_group, torch.device("cpu")), strict=True)
        check_same_text(checksums, self.config.data.name)
        return int(max(signums))

    # --- one step

    def _train_step(self, batch: StepBatch) -> StepMetrics | None:
        config, number = self.config, self.step + 1
        reported = number % config.logging.log_every == 0 or number in (config.last_step, self.started_step + 1)
        recorder = Recorder(self.sp.device) if number == config.logging.profile else None
        sampled = reported and self.group is not None and recorder is None  # one profiler at a time
        sampling = self.sampler.measure() if sampled else contextlib.nullcontext()
        with sampling if recorder is None else recorder.step(self._barrier):
            start = time.perf_counter()
            loss, norm = self._update(batch)
            self.seconds.append(time.perf_counter() - start)
        if recorder is not None:
            self._write_trace(recorder)
        self.step = number
        self.tokens += batch.tokens
        self.counted.append((batch.tokens, batch.padded, batch.attention_pairs))
        self.data_state = batch.state
        warning = self.health.look(self.step, loss, norm)
        if warning is not None:
            self.display.log(warning)
        return self._metrics(batch, loss, norm) if reported else None

    def _barrier(self) -> None:
        if self.cpu_group is not None:
            dist.barrier(group=self.cpu_group)

    def _write_trace(self, recorder: Recorder) -> None:
        self._at("gathering the trace", self.step + 1, unlimited=True)
        events = gather_trace(recorder.events, self.cpu_group)
        if not self.first:
            return
        path, written = self.config.out / "profile" / f"step-{self.step + 1}.trace.json", io.StringIO()
        try:
            write_file("trace", path, lambda file: file.write_text(json.dumps({"traceEvents": events})), written)
        except LongspanError as error:  # a full disk does not end the run
            written.write(f"{error}; going on without it")
        for line in [*written.getvalue().splitlines(), *summary_lines(read_trace(events))]:
            self.display.log(line)

    def _update(self, batch: StepBatch) -> tuple[float, float]:
        """Run forward, backward and optimizer; return the loss and the norm of the gradients.

        If either is not finite, raise. The weights are then unchanged, unless the optimizer runs in the backward.
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
                raise LongspanError(self.health.format_updated(self.step + 1, value, norm))
        if not (math.isfinite(value) and math.isfinite(norm)):
            self.optimizer.zero_grad()
            self._at("looking for the first value that is not finite", self.step + 1, unlimited=True)
            found = watch(self.model, self.sp, lambda: self._accumulate(batch))
            raise LongspanError(self.health.format_nonfinite(self.step + 1, value, norm, found, self.started_step))
        self.optimizer.step()  # no effect on weights that were updated in the backward
        self.scheduler.step()
        self.optimizer.zero_grad()
        return value, norm

    def _accumulate(self, batch: StepBatch) -> Tensor:
        """Run forward and backward of all micro-batches; return the loss of the step. Repeatable to the bit."""
        # Dropout then depends on the seed, the step and the rank alone, so a resumed run draws the same.
        torch.manual_seed(step_seed(self.config.seed, self.step, self.sp.data_rank * self.sp.size + self.sp.rank))
        loss = torch.zeros((), device=self.sp.device)
        last = len(batch.micro_batches) - 1
        for i, micro in enumerate(batch.micro_batches):
            self._at("forward and backward", self.step + 1)
            inputs = {k: v.to(self.sp.device) if isinstance(v, Tensor) else v for k, v in micro.items()}
            with no_sync(self.model) if self.reduce_last and i < last else contextlib.nullcontext():
                with torch.autocast(self.sp.device.type, torch.bfloat16, enabled=self.autocast):
                    # Take the loss only: the output would hold the logits during the backward.
                    part: Tensor
                    if self.preferences is None:
                        part = self.model(**inputs, num_items_in_batch=batch.label_tokens).loss
                    else:
                        part = self.preferences.loss(inputs, batch.documents // 2)
                if self.in_backward is not None and self.in_backward.active and not part.isfinite():
                    return part.detach()  # on every rank; a backward would spoil the weights
                part.backward()
            # Each part is a sum over the tokens of all replicas, divided by the labels of the whole step.
            loss += part.detach()
        return loss

    def _reduces_last(self) -> bool:
        """Return whether to reduce gradients after the last micro-batch only; the same on every rank."""
        config, sp = self.config, self.sp
        if config.optimizer.reduce != "auto" or self.group is None:
            return config.optimizer.reduce != "each"
        width = 2 if config.optimizer.grad_dtype == "bf16" else 4  # bytes of an unreduced gradient's element
        nbytes = width * sum(p.numel() // tensor_parts(p) for p in self.model.parameters() if p.requires_grad)
        sharded = config.fsdp and sp.world_size > 1
        once = reduces_once(sharded, nbytes, device_memory(sp.device))
        last = torch.tensor(once, device=sp.device, dtype=torch.int32)
        dist.all_reduce(last, dist.ReduceOp.MIN, group=self.group)
        return bool(last)

    def _metrics(self, batch: StepBatch, loss: float, norm: float) -> StepMetrics:
        sp, steps, seconds = self.sp, len(self.seconds), sum(self.seconds)
        tokens, padded, pairs = map(sum, zip(*self.counted, strict=True))
        offload = offload_metrics(self.model, seconds)
        self.seconds.clear()
        self.counted.clear()
        memory = peak_memory(sp.device)
        communication = self.sampler.share
        if self.group is not None:
            most = torch.tensor(memory, device=sp.device)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
            share = torch.tensor(communication or 0.0, device=sp.device)
            dist.all_reduce(share, group=self.group)
            memory, communication = most.tolist(), share.item() / sp.job_size
        peak, flops = peak_flops(sp.device, self.config.dtype), None
        if peak is not None and self.shape is not None:
            forwards = 1 if self.preferences is None else 2
            flops = model_flops(
                self.shape, tokens, pairs, trained=self.trained, forwards=forwards, frozen=self.without_backward
            )
        return StepMetrics(
            step=self.step,
            loss=loss,
            grad_norm=norm,
            lr=self.lr,
            tokens=self.tokens,
            tokens_per_s=tokens / seconds,
            step_s=seconds / steps,
            communication=communication,
            peak_memory_gib=memory[0],
            peak_reserved_gib=memory[1] or None,
            reserved_ratio=memory[2] or None,
            mfu=flops / (seconds * peak * sp.job_size) if flops and peak else None,
            padding=1 - tokens / padded if self.inputs.pack in ("best-fit", "none") else None,
            truncated=batch.state["counts"]["truncated"] or None,
            left_out=batch.state["counts"]["left_out"] or None,
            **offload,
            **({} if self.preferences is None else self.preferences.report()),
        )


def offload_metrics(model: Any, seconds: float) -> dict[str, float | None]:
    """Return the offload fields of `StepMetrics` since the last call, over `seconds` of steps; {} without offload."""
    store = state_of(model).memory.store
    if store is None:
        return {}
    moved = store.stats.take()
    return {
        "offload_gb_per_s": moved["bytes"] / moved["seconds"] / 1e9 if moved["seconds"] else 0.0,
        "offload_waited": moved["waited"] / seconds,
    }


def be_deterministic() -> None:
    """Use deterministic kernels only, and raise where torch has none. Call before the first CUDA call of the process.

    cuBLAS reads its variable when it starts. Attention's backward then also sums dQ in a fixed order.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    options: Any = torch.utils.deterministic
    options.fill_uninitialized_memory = False  # nothing reads memory that it has not written
    torch.backends.cudnn.benchmark = False


def step_seed(seed: int, step: int, rank: int) -> int:
    """Return the 64-bit seed of one rank's step: a hash, so that no two share a random stream."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=8).digest())
