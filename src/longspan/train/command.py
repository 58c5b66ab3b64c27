"""`longspan train METHOD --config run.yaml`: check a run, start its ranks, and train on them by TRL's trainers.

    longspan train sft --config examples/sft.yaml --ulysses 8
    torchrun --nproc-per-node 8 -m longspan train sft --config examples/sft.yaml --ulysses 8

The keys are TRL's and ours (`longspan.train.arguments`). Without torchrun or srun the command starts the ranks itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import EarlyStoppingCallback

from longspan.checkpoint import checkpoint_to_resume, read_verified
from longspan.comm.agree import open_together
from longspan.comm.mesh import SequenceSharding
from longspan.core.errors import LongspanError
from longspan.core.validation import check_processes
from longspan.hf.model.pretrained import first_line
from longspan.ranks import launch
from longspan.ranks.facts import model_facts
from longspan.ranks.watch import Watch
from longspan.train import model as models
from longspan.train.arguments import Arguments, Settings, class_of, read
from longspan.train.callbacks import Profile, Progress, preview
from longspan.train.datasets import Data, find_row, open_data
from longspan.train.resolve import Resolved, dry_run, resolve, summary
from longspan.trainers.callbacks import Figures, StepLine, StopOnSignal
from longspan.trainers.mixin import trainer as sharded
from longspan.trainers.muon import muon


def _trainer_class(arguments: Arguments) -> Any:
    """Return TRL's class, whose reference is the model without LoRA. TRL would copy the adapter of a model that has
    one already.
    """
    cls = class_of(arguments.method, "Trainer")
    if not arguments.trainer.reference:
        return cls

    def init(self: Any, *args: Any, model: Any, ref_model: Any = None, **options: Any) -> None:
        adapted = hasattr(model, "peft_config")
        cls.__init__(self, *args, model=model, ref_model=model.get_base_model() if adapted else ref_model, **options)
        if adapted:
            self.ref_model = None

    return type(cls.__name__, (cls,), {"__init__": init, "__module__": cls.__module__})


@dataclasses.dataclass(frozen=True)
class _Opened:
    arguments: Arguments
    resolved: Resolved
    tokenizer: Any
    data: Data


def run(argv: list[str]) -> int:
    """Train on ranks started here or by torchrun, and return 0; raise as `longspan.ranks.launch.launch`.

    `longspan.cli.main` calls it with the arguments after `longspan train`.
    """
    settings = read(argv)
    ours = settings.ours  # `ours.parallel`: the `ParallelConfig` of --data, --ring, --ulysses and --tensor
    launch.check_started(ours.parallel.ranks, str(ours.parallel))
    if ours.max_restarts and (ours.parallel.ranks == 1 or launch.is_started_rank()):
        raise LongspanError(
            f"max_restarts: {ours.max_restarts} restarts ranks that this command starts, and it starts none; give "
            "torchrun's --max-restarts, or leave it out on one rank"
        )
    if ours.dry_run or not launch.is_started_rank():
        if not ours.dry_run:
            check_processes(ours.parallel.ranks, str(ours.parallel))
        opened = _open(settings, on_rank=ours.parallel.ranks == 1)
        if ours.dry_run:
            if launch.is_first_rank():
                print(*opened.resolved.messages, *dry_run(opened.arguments, opened.resolved), sep="\n", flush=True)
            return 0
    for restart in range(ours.max_restarts + 1):
        try:
            launch.launch(train, argv, nproc=ours.parallel.ranks, grace_s=ours.grace)
            break
        except launch.RankFailed as error:
            if restart == ours.max_restarts:
                raise
            print(f"longspan: {error}; restart {restart + 1} of {ours.max_restarts}", file=sys.stderr, flush=True)
            argv = [*argv, "--resume_from_checkpoint", "auto"]
    return 0


def _open(settings: Settings, *, on_rank: bool = True) -> _Opened:
    """Open and check model config, tokenizer and data."""
    arguments = settings.arguments(on_rank)
    resolved = resolve(arguments)
    tokenizer = models.tokenizer_of(arguments, resolved.config)
    training = arguments.training
    older = sorted(Path(training.output_dir).glob("checkpoint-*"))
    if str(training.resume_from_checkpoint).lower() == "false" and older:
        raise LongspanError(
            f"resume_from_checkpoint: false starts anew, and {older[0]} is of an older run: a later start would resume "
            "the one that has more steps; remove its checkpoints, or give another output_dir"
        )
    if resolved.context is not None:
        training.max_length = resolved.context
    template = bool(tokenizer.chat_template or getattr(training, "chat_template_path", None))
    data = open_data(arguments, template)
    row = next(iter(data.train))
    chats = any(isinstance(row.get(column), list) for column in ("messages", "prompt", "chosen"))
    if chats and not template:
        raise LongspanError(
            f"{data.sources[0].name} has chats, and the tokenizer has no chat template; give `chat_template_path`, or "
            "`tokenizer` of an instruction-tuned model",
            code="LS503",
        )
    if "images" in row or "image" in row:
        tokenizer = models.processor_of(resolved.config, models.name_of(arguments), tokenizer)
    return _Opened(arguments, resolved, tokenizer, data)


def _facts(opened: _Opened) -> dict[str, Any]:
    """Return what must be equal on every rank. Machines of other memory are planned otherwise."""
    found, fix = opened.resolved, "(if the planner chose it, give rank_memory)"
    planned = {f"context {fix}": found.context, f"memory {fix}": found.memory.describe()}
    return {**model_facts(found.config), **planned}


def train(argv: list[str]) -> None:
    """Join the job, and train on one rank; `launch` runs this in each process. Collective."""
    settings = read(argv)
    ours = settings.ours
    with launch.joined(ours.timeouts.timeout, ours.timeouts.start_timeout) as watch:
        train_rank(settings, watch)


def train_rank(settings: Settings, watch: Watch) -> None:
    """Train on one rank. Collective. Raise `Stopped` if a signal reached any rank, after all have saved."""
    watch.at("start", unlimited=True)
    open_together(lambda: settings, lambda same: same.values)
    opened = open_together(lambda: _open(settings), _facts)
    watch.at("loading", unlimited=True)
    training = opened.arguments.training
    with launch.StopRequest("stopping after this step") as request:
        stop = StopOnSignal(request)
        trainer = _trainer(opened, watch, stop)
        StepLine.replace_printer(trainer)
        trainer.add_callback(Figures(trainer))
        if opened.arguments.muon:
            options = {
                "lr": training.learning_rate, "betas": (training.adam_beta1, training.adam_beta2),
                "eps": training.adam_epsilon, "weight_decay": training.weight_decay,
            }  # fmt: skip
            trainer.optimizer_cls_and_kwargs = (muon, options)
        if settings.ours.preview:
            preview(trainer, settings.ours.preview)
            return
        _log(trainer, [*opened.resolved.messages, *summary(opened.arguments, opened.resolved)])
        resumed = _resumed(training)
        done = 0 if resumed is None else read_verified(resumed, content=False).step
        if 0 < training.max_steps <= done:
            _log(trainer, [f"nothing to train: {resumed} is the last of max_steps: {training.max_steps}"])
            trainer.longspan_load(resumed)
        else:
            with _naming_row(opened, training=True):
                trainer.train(resumed)
        if signum := stop.received(training.device):  # it may have reached one rank after the last step
            _log(trainer, [f"stopped by a signal after step {trainer.state.global_step}; the same command resumes"])
            raise launch.Stopped(signum)
    watch.at("export", unlimited=True)
    trainer.save_model()
    _log(trainer, [f"exported {training.output_dir}"])


def _trainer(opened: _Opened, watch: Watch, stop: StopOnSignal) -> Any:
    """Return the trainer of a run, with its sharded model."""
    arguments, resolved, data = opened.arguments, opened.resolved, opened.data
    ours, training = arguments.ours, arguments.training
    with launch.stdout_to_stderr(discard=True):  # gloo greets there
        sp = SequenceSharding.of(ours.parallel)
    origin = models.origin_of(arguments, resolved.config)
    images = hasattr(opened.tokenizer, "image_processor")
    model = models.load(arguments, origin, sp, resolved.memory, images=images)
    options: dict[str, Any] = {}
    beside = {"teacher_model": resolved.teacher}
    if arguments.trainer.reference and not hasattr(model, "peft_config"):
        beside["ref_model"] = origin
    for name, of in beside.items():
        if of is not None:
            options[name] = models.load(arguments, of, sp, resolved.memory, images=images, frozen=True)
    if ours.elastic and resolved.context is not None:
        options["elastic"] = -(-resolved.context // sp.size)
    if sp.shards_weights(fsdp=ours.shard_weights, cpu_offload=resolved.memory.cpu_offload):
        training.bf16, training.mixed_precision = False, "no"  # FSDP casts what it gathers; the weights stay in fp32
    if arguments.method == "sft" and data.evaluated is not None:
        options["loss_by_position"] = resolved.context
    callbacks: list[Any] = [Progress(watch), stop]
    if ours.early_stopping_patience is not None:
        callbacks.append(EarlyStoppingCallback(ours.early_stopping_patience))
    if ours.profile is not None:
        callbacks.append(Profile(ours.profile, sp))
    training.model_init_kwargs = training.teacher_model_init_kwargs = None
    training.logging_nan_inf_filter = False
    with _naming_row(opened):
        return sharded(_trainer_class(arguments))(
            model=model,
            args=training,
            train_dataset=data.train,
            eval_dataset=data.evaluated,
            processing_class=opened.tokenizer,
            callbacks=callbacks,
            sp=sp,
            **options,
        )


@contextlib.contextmanager
def _naming_row(opened: _Opened, *, training: bool = False) -> Iterator[None]:
    """Name the row in an error of TRL, which tokenises when a trainer is made, and a stream's rows in training."""
    try:
        yield
    except LongspanError:
        raise
    except Exception as error:  # templates raise any kind
        streams = tuple(source for source in opened.data.sources if source.newest is not None)
        data = dataclasses.replace(opened.data, sources=streams) if training else opened.data
        found = find_row(data, opened.arguments, opened.tokenizer)
        if found is None and (training or not isinstance(error, ValueError | TypeError | RuntimeError | ImportError)):
            raise
        raise LongspanError(found or first_line(error), code="LS502" if found else None) from error


def _resumed(training: Any) -> str | None:
    """Return the checkpoint to resume from: that of `resume_from_checkpoint`, by default the newest. Collective."""
    asked, run = str(training.resume_from_checkpoint), Path(training.output_dir)
    if asked.lower() not in ("none", "true", "auto"):
        return None if asked.lower() == "false" else asked
    return checkpoint_to_resume(run)


def _log(trainer: Any, lines: list[str]) -> None:
    if trainer.is_world_process_zero():
        print(*lines, sep="\n", flush=True)
