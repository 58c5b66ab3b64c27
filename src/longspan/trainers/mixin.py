"""Hugging Face's Trainer, and every subclass of it, over sharded sequences.

    Trainer = longspan.trainer(transformers.Trainer)
    trainer = Trainer(model, args, train_dataset=data, sp=longspan.SequenceSharding(longspan.init_mesh(ulysses=4)))

The ranks of a sequence group read the same batches and count as one process. Loss, gradients, their norm, and the loss
of an evaluation equal those of one process with the same global batch. Nothing of transformers is patched: a subclass
overrides some methods, and uses `longspan.compat.accelerate_api.ReplicaAccelerator` in place of accelerate's.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import random
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import get_device_states, set_device_states
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME

from longspan import checkpoint as checkpoints
from longspan.checkpoint.folder import begin, newest_first
from longspan.comm.agree import error_text
from longspan.comm.mesh import SequenceSharding
from longspan.compat.accelerate_api import ReplicaAccelerator
from longspan.compat.torch_checkpoint import low_bit_adamw
from longspan.compat.transformers_api import output_dir_of
from longspan.core.errors import LongspanError
from longspan.core.tile_sizes import reduces_once
from longspan.elastic.batches import Elastic, samples_of_batch
from longspan.hf.batch.shard import IGNORE, WIDTH
from longspan.hf.forward.loss import problem_of
from longspan.hf.memory import device_memory
from longspan.hf.model.pretrained import first_line
from longspan.hf.model.support import transformers_model
from longspan.hf.parallelize import parallelize
from longspan.hf.state import is_parallelized, state_of
from longspan.hf.weights.gradients import no_sync
from longspan.hf.weights.sources import tensor_parts
from longspan.trainers.callbacks import Figures, StopAtNonFinite, StopOnSignal
from longspan.trainers.evaluation import ByPosition, Tally
from longspan.trainers.trl import (
    count_sequence_groups,
    divides_by_processes,
    loss_of_rollouts,
    loss_with_teacher,
    refuse_whole_logits,
    replace_fused_head,
    replace_whole_logits,
)

if TYPE_CHECKING:
    from longspan.hf.forward.hooks import ForwardHooks

Class = TypeVar("Class", bound=type[Trainer])

OPTIONS = tuple(inspect.signature(parallelize).parameters)[2:]
"""Keywords of a trainer that are those of `longspan.parallelize`, behind `model` and `sp`."""

REFUSED = {
    "fsdp": "longspan shards the weights itself; leave it out",
    "deepspeed": "longspan shards weights and sequences itself; leave it out",
    "parallelism_config": "the mesh defines how the ranks are used; leave it out",
    "label_smoothing_factor": "it needs the logits of all tokens; leave it out",
    "auto_find_batch_size": "ranks could choose different sizes; leave it out",
    "use_liger_kernel": "leave it out: the loss is computed by tiles, without logits",
}
"""Training arguments that must be unset, and why."""


def trainer(cls: Class) -> Class:
    """Return a subclass of a Hugging Face trainer that trains over sharded sequences.

    Args:
        cls: `transformers.Trainer`, or any subclass of it: TRL's `SFTTrainer`, your own.

    Returns:
        A class that accepts the arguments of `cls`, `sp=` (a `longspan.SequenceSharding`) and the options of
        `longspan.parallelize`, and calls `parallelize` itself, after PEFT. See `TrainerMixin`.

    Raises:
        LongspanError: if `cls` is not a subclass of `transformers.Trainer`.
    """
    if not (isinstance(cls, type) and issubclass(cls, Trainer)):
        got = f"the class {cls.__name__}" if isinstance(cls, type) else f"an instance of {type(cls).__name__}"
        raise LongspanError(
            f"longspan.trainer takes transformers.Trainer or a subclass of it, got {got}; call "
            f"longspan.trainer(transformers.Trainer)(model, args, ..., sp=sp)"
        )
    if issubclass(cls, TrainerMixin):
        return cls
    made: Any = type(f"Sharded{cls.__name__}", (TrainerMixin, cls), {"__doc__": cls.__doc__, "__module__": __name__})
    return made  # type: ignore[no-any-return]


class TrainerMixin(Trainer):  # type: ignore[misc]
    """Makes a trainer train over sharded sequences: `class MyTrainer(longspan.TrainerMixin, SomeTrainer)`.

    `per_device_train_batch_size` counts per replica, of which there are `sp.data_size`: the ranks of a sequence group
    and its tensor axis read the same batches. A checkpoint is the usual Hugging Face folder, and in it `longspan/` with
    sharded weights and optimizer state, from which a run can resume on another mesh. Every rank calls every method.

    Args:
        sp: the sharding.
        loss_by_position: tokens of a context. Also evaluate the loss by the number of tokens that a prediction sees, in
            at most 8 ranges that end at this number, its half and so on: `eval_loss_to_4096`, ...
        elastic: give each sample of a training batch as many ranks as its length needs, with at most this many tokens
            on a rank at a time (`longspan.elastic_batches`). Needs data=1: narrower groups replace replicas.
        shared_prefixes: compute shared prefixes once, in a trainer that scores several completions of a prompt (GRPO).
        args, kwargs: of the trainer, and the options of `longspan.parallelize`.

    Raises:
        LongspanError: when the trainer is made, for options that would compute something else when sharded, with a fix.
    """

    accelerator: Any

    def __init__(
        self,
        *args: Any,
        sp: SequenceSharding,
        elastic: int | None = None,
        loss_by_position: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.longspan_sp = sp
        if self.longspan_sharded:
            refuse_whole_logits(type(self))
        shared_prefixes = kwargs.pop("shared_prefixes", False)
        self.longspan_options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        self.longspan_eval, self.longspan_context = Tally(), loss_by_position
        self.longspan_step = _Step()
        self.longspan_saver = checkpoints.Saver()
        super().__init__(*args, **kwargs)
        self._refuse(shared_prefixes, elastic)
        self.longspan_loss = loss_with_teacher(self) or loss_of_rollouts(self, super().compute_loss)
        if self.longspan_sharded:
            count_sequence_groups(self, sp)
            replace_whole_logits(self)
        self.args.logging_nan_inf_filter = False  # which would log a mean in place of NaN
        self.add_callback(StopAtNonFinite(self))
        if self.longspan_sharded and self.args.enable_jit_checkpoint:
            self._stop_together()
        self.longspan_config = copy.deepcopy(transformers_model(self.model).config)
        # The trained model last: `memory="auto"` counts the others' shards as taken.
        for model in (getattr(self, "ref_model", None), getattr(self, "teacher_model", None), self.model):
            if model is None:
                continue
            score = replace_fused_head(model, self)
            if not is_parallelized(model):
                parallelize(model, sp, **self.longspan_options)
            options = state_of(model).forward.options
            options.score, options.shared_prefixes = score, shared_prefixes
        self.longspan_elastic = None if elastic is None else Elastic(sp, self.model, elastic)

    @property
    def _forward_hooks(self) -> ForwardHooks:
        return state_of(self.model).forward

    def longspan_policy(self, dtype: str) -> torch.dtype | None:
        """Return a dtype of FSDP's mixed precision (`param_dtype`, `reduce_dtype`), or None."""
        return getattr(getattr(self._forward_hooks.model_changes, "policy", None), dtype, None)

    @property
    def longspan_sharded(self) -> bool:
        return self.longspan_sp.world_size > 1

    def _refuse(self, shared_prefixes: bool, elastic: int | None) -> None:
        args, sp, sharded, name = self.args, self.longspan_sp, self.longspan_sharded, type(self).__name__
        unsupported = {
            **{key: (getattr(args, key, None), why) for key, why in REFUSED.items()},
            "compute_loss_func": (self.compute_loss_func, "it would see one rank's tokens; use the model's loss"),
            "model_init": (sharded and self.model_init, "it makes a new model after it was sharded; pass model="),
            "save_only_model": (
                sharded and args.load_best_model_at_end and args.save_only_model,
                "load_best_model_at_end=True loads sharded weights, which it leaves out; leave it False",
            ),
        }
        generates = hasattr(self, "num_generations")
        compares = any(getattr(self, name, None) is not None for name in ("ref_model", "teacher_model"))
        wrong = {
            f"the mesh has {sp.world_size} ranks and the Trainer sees {args.world_size} processes; make the mesh with "
            "longspan.init_mesh over all of them": args.world_size != sp.world_size,
            **{f"{k}={x!r} does not work with a sharded sequence: {why}": x for k, (x, why) in unsupported.items()},
            "average_tokens_across_devices=False would average the replicas' means; leave it True": (
                sp.data_size > 1 and not args.average_tokens_across_devices
            ),
            f"one process sees {args.n_gpu} GPUs; start one per GPU (torchrun --nproc-per-node {args.n_gpu})": (
                args.n_gpu > 1
            ),
            f"shared_prefixes={shared_prefixes!r} is for trainers that score several completions of a prompt "
            f"(GRPOTrainer), and {name} is none; leave it out": shared_prefixes and not generates,
            f"the model is parallelized already, so {', '.join(sorted(self.longspan_options))} have no effect; pass "
            "them to longspan.parallelize": is_parallelized(self.model) and self.longspan_options,
            f"elastic={elastic} is for one replica and a loss of one batch of tokens; use ulysses={sp.fsdp_size}, and "
            "no trainer that generates or compares models": elastic and (sp.data_size > 1 or generates or compares),
            # TRL adds it once per forward, so once per round.
            f"elastic={elastic} runs a batch in rounds, and TRL would add the router loss in each; set "
            "router_aux_loss_coef=0 in the model's config, or use longspan.elastic_batches in your own loop": (
                elastic and getattr(self, "aux_loss_enabled", False)
            ),
        }
        for message, applies in wrong.items():
            if applies:
                raise LongspanError(message)

    # --- replicas as processes

    def create_accelerator_and_postprocess(self) -> None:
        """As the base class, with an accelerator that counts replicas."""
        super().create_accelerator_and_postprocess()
        if self.longspan_sharded:
            self.accelerator = ReplicaAccelerator.of(self.accelerator, self.longspan_sp)
            self.accelerator.counts_replicas = divides_by_processes(self)
            self.accelerator.no_sync = self._no_sync
            self.gather_function = self.accelerator.gather_for_metrics
        elif dist.is_initialized():  # one rank of torchrun: DDP would average nothing, and refuse unused weights
            self.accelerator.prepare_model = functools.partial(self.accelerator.prepare_model, evaluation_mode=True)

    def _no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Average gradients once per accumulation, if each rank has memory for unsharded ones until then."""
        return no_sync(self.model) if self._reduces_once else contextlib.nullcontext()

    @functools.cached_property
    def _reduces_once(self) -> bool:
        sp, dtype = self.longspan_sp, self.longspan_policy("reduce_dtype")
        trained = [p for p in self.model.parameters() if p.requires_grad]
        nbytes = sum((dtype or p.dtype).itemsize * p.numel() // tensor_parts(p) for p in trained)
        sharded = sp.fsdp_size > 1 and state_of(self.model).gradients is None
        once = torch.tensor(reduces_once(sharded, nbytes, device_memory(sp.device)), dtype=torch.int32)
        once = once.to(sp.device)
        dist.all_reduce(once, dist.ReduceOp.MIN, group=sp.world_group)
        return bool(once)

    def _stop_together(self) -> None:
        """Replace transformers' callback for SIGTERM, which saves on the rank that received it."""
        for callback in [x for x in self.callback_handler.callbacks if hasattr(x, "jit_manager")]:
            callback.on_train_end(self.args, self.state, self.control)  # restores the previous handler
            self.remove_callback(callback)
        self.add_callback(StopOnSignal())

    def get_tp_size(self) -> int:
        """Return the ranks that read the same batch, by which the Trainer divides processes and tokens."""
        return self.longspan_sp.model_size

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """As the base class, which sums over processes, but count the tokens of a sequence group once."""
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        self.state.num_input_tokens_seen = (
            before + (self.state.num_input_tokens_seen - before) // self.longspan_sp.model_size
        )

    def store_flos(self) -> None:
        """As the base class, but count the FLOPs of a sequence group once."""
        before = self.state.total_flos
        super().store_flos()
        self.state.total_flos = before + (self.state.total_flos - before) / self.longspan_sp.model_size

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        sharded = self.longspan_sharded and self.longspan_options.get("fsdp", True)
        if not sharded and self.longspan_sp.tensor_size == 1:  # else `parallelize` moves it, layer by layer
            super()._move_model_to_device(model, device)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: it would make a new model for each trial."""
        raise LongspanError("hyperparameter_search makes a new model for each trial; run the trials one by one")

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        """TRL calls it before the models are sharded, and saves what it computes in a folder of each process."""
        if not self.longspan_sharded:
            return super()._precompute_ref_logps(*args, **kwargs)
        raise LongspanError(
            "precompute_ref_log_probs=True computes whole sequences on every rank, before the models are sharded, and "
            "the ranks do not find what the first one saved; leave it out: the reference model is sharded like the "
            "policy, and LoRA needs none"
        )

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        """As the base class; torchao's optimizers get states that each rank can save and load."""
        kind, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
        low_bit = args.optim in ("adamw_torch_8bit", "adamw_torch_4bit")
        return low_bit_adamw(kind) if low_bit else kind, options

    # --- loss

    def _prepare_inputs(self, inputs: Any) -> Any:
        if isinstance(inputs, Mapping) and inputs.get("loss_weights") is not None:
            raise LongspanError(
                "`loss_weights`: a Trainer divides the loss by the number of labels, not by the sum of their weights; "
                "use your own training loop"
            )
        return super()._prepare_inputs(inputs)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """As the base class; with `elastic` in rounds, whose losses add to that of the batch."""
        if self.longspan_step.complete:
            self.longspan_step = _Step()
        if self.longspan_elastic is None:
            with self._explain_logits():
                loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        else:
            loss = self._rounds(model, inputs, num_items_in_batch)
        self.longspan_step.losses.append(loss)
        self.longspan_step.complete = self.accelerator.sync_gradients
        return loss

    def _rounds(self, model: nn.Module, inputs: Any, num_items_in_batch: Any) -> Tensor:
        if num_items_in_batch is None:
            raise LongspanError("elastic= needs a Trainer that divides the loss by the labels of the batch")
        assert self.longspan_elastic is not None
        losses = []
        for batch in self.longspan_elastic.step(samples_of_batch(inputs)):
            del batch["num_items_in_batch"]
            before = self._forward_hooks.losses.computed
            with self._forward_hooks.options.during(noise_tokens=inputs["input_ids"].shape[1]):
                loss = super().training_step(model, batch, num_items_in_batch)
            if self._forward_hooks.losses.computed == before and self.longspan_sharded:
                # The trainer computed a loss of the group's row itself.
                dist.all_reduce(loss, group=self.longspan_sp.fsdp_group)
                loss = loss / self.longspan_sp.fsdp_size
            losses.append(loss)
        return torch.stack(losses).sum()

    @contextlib.contextmanager
    def _explain_logits(self) -> Iterator[None]:
        """Explain an error of a `compute_loss` that combines the logits of one rank's tokens with labels of all."""
        try:
            yield
        except (ValueError, RuntimeError, IndexError) as error:
            tokens = self._forward_hooks.returned_tokens
            in_loss = any(x.f_code.co_name == "compute_loss" for x, _ in traceback.walk_tb(error.__traceback__))
            if tokens is None or not in_loss or type(error) not in (ValueError, RuntimeError, IndexError):
                raise
            mine, whole = tokens
            raise LongspanError(
                f"compute_loss of {type(self).__name__.removeprefix('Sharded')} failed on logits of this rank's {mine} "
                f"of {whole} tokens, as a parallelized model returns ({error_text(error)}); pass labels= so that the "
                f"model computes the loss, use longspan.token_logprobs(model, batch), or gather them by "
                f"trainer.longspan_sp.gather(logits, dim=1, length={whole})"
            ) from error

    def longspan_repeat_step(self) -> Tensor:
        """Run forward and backward of the step in progress a second time, with the same random numbers."""
        losses = []
        for inputs, items, state in self.longspan_step.batches:
            torch.set_rng_state(state[0])
            set_device_states(*state[1:])
            with self.compute_loss_context_manager():
                losses.append(self.compute_loss(self.model, inputs, num_items_in_batch=items))
            losses[-1].backward()
        return torch.stack([loss.detach() for loss in losses]).sum()

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        """As the base class, and remember the norm."""
        norm = super()._get_grad_norm(*args, **kwargs)
        self.longspan_step.norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return self.longspan_step.norm

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """As the base class; in a round of an elastic batch, weight a loss that the trainer computed itself."""
        if self.model.training and not self.longspan_step.complete and self.is_in_train:
            on_device = torch.empty(0, device=self.args.device)
            random_state = torch.get_rng_state(), *get_device_states(on_device)
            self.longspan_step.batches.append((dict(inputs), num_items_in_batch, random_state))
        if not self.longspan_sharded:
            compute = self.longspan_loss or super().compute_loss
            return compute(model, inputs, return_outputs, num_items_in_batch)
        if self._forward_hooks.traits.labels_per_row:  # its loss is a mean already
            num_items_in_batch = None
        elif not self.model.training:
            if num_items_in_batch is None:
                num_items_in_batch = self.longspan_eval.items
            else:  # versions of transformers differ in which labels count
                self.longspan_eval.items = int(num_items_in_batch)
        if self.longspan_loss is not None:
            return self.longspan_loss(model, inputs, return_outputs, num_items_in_batch)
        before, width = self._forward_hooks.losses.computed, inputs.get(WIDTH)
        # A Trainer multiplies a loss with `num_items_in_batch` by the number of replicas.
        with self._forward_hooks.options.during(replicas=self.longspan_sp.data_size):
            found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if width is None or self._forward_hooks.losses.computed > before:
            return found
        # The trainer computed a loss of its group's row itself. Rounds add the rows of all groups, of any width.
        loss, outputs = found if return_outputs else (found, None)
        loss = loss * (self.longspan_sp.fsdp_size / width)
        return (loss, outputs) if return_outputs else loss

    # --- evaluation

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """As the base class, but the loss is the mean over all labelled tokens of the set, not over batches."""
        self.longspan_eval = Tally()
        context, options = self.longspan_context, self._forward_hooks.options
        by_position = None if context is None else ByPosition(context, self.longspan_sp)
        with options.during(token_losses=None if by_position is None else by_position.add):
            output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        mean = self.longspan_eval.mean()
        if mean is not None:
            output.metrics[f"{metric_key_prefix}_loss"] = mean
        for end, loss in ({} if by_position is None else by_position.means()).items():
            output.metrics[f"{metric_key_prefix}_loss_to_{end}"] = loss
        return output

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """As the base class, with the logits of all tokens gathered, or without any if only the loss is needed."""
        if not isinstance(inputs, Mapping):  # prompts, to which the trainer generates
            prompts: tuple[Any, Any, Any] = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
            return prompts
        inputs = self._mask_repeated(dict(inputs))
        self.longspan_eval.items = self._labelled(inputs)
        with self._forward_hooks.options.during(loss_only=prediction_loss_only):
            loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        count = self.longspan_eval.items
        if loss is not None and count is not None:
            mean = self.accelerator.gather_over_replicas(loss).mean() if self.longspan_sharded else loss
            self.longspan_eval.add(float(mean), count)
        self._forward_hooks.options.rows = None
        if logits is not None and self.longspan_sharded and not self._forward_hooks.traits.labels_per_row:
            length = (inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]).shape[1]
            logits = _gathered(logits, self.longspan_sp, length)
        return loss, logits, labels

    def _mask_repeated(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Mask the labels of samples that only fill the last batch."""
        labels = inputs.get("labels")
        if not (self.longspan_sharded and isinstance(labels, Tensor)):
            return inputs
        real = self.accelerator.real_samples()
        if real is not None:
            mine = max(0, min(len(labels), real - self.longspan_sp.data_rank * len(labels)))
            if self._forward_hooks.traits.labels_per_row:
                self._forward_hooks.options.rows = mine
                return inputs
            inputs["labels"] = torch.cat([labels[:mine], torch.full_like(labels[mine:], IGNORE)])
        return inputs

    def _labelled(self, inputs: Mapping[str, Any]) -> int | None:
        """Return the labelled tokens (or rows) of all replicas; None without labels. Collective."""
        labels = inputs.get("shift_labels")
        if labels is None:
            labels = inputs.get("labels")
            if labels is not None and self._forward_hooks.traits.labels_per_row:
                labels = labels[: self._forward_hooks.options.rows]
                if problem_of(state_of(self.model).config, labels) != "single_label_classification":
                    labels = torch.zeros(labels.shape)  # no entry is masked
            elif labels is not None and not self._forward_hooks.traits.labels_per_token:
                labels = labels[..., 1:]
        if labels is None:
            return None
        count = (labels != IGNORE).sum().to(self.args.device)
        return int(self.accelerator.gather_over_replicas(count).sum()) if self.longspan_sharded else int(count)

    # --- checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the Hugging Face folder, on all ranks."""
        self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        checkpoints.export(folder, self.model, self.longspan_config, tokenizer)
        checkpoints.Ranks().first(lambda: _write(self.args, folder / "training_args.bin"))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """As the base class, after an older run's checkpoint of this step is set aside."""
        path = checkpoints.step_path(Path(output_dir_of(self, trial)), self.state.global_step)

        def make_room() -> None:
            begin(path)
            (path / TRAINER_STATE_NAME).unlink(missing_ok=True)  # what a killed run left

        checkpoints.Ranks().first(make_room)
        super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        """As the base class, then begin to save the shards. The Trainer writes its state afterwards, as the last file.

        It removes older checkpoints before a save in the background is complete. With a limit of 2 it may keep a single
        other one: the best, or one that a killed run has left incomplete.
        """
        save = super()._save_rng_state

        def saved() -> None:
            try:
                save(output_dir)
            except RuntimeError as error:  # torch's own writer does not say that a disk is full
                raise LongspanError(f"random states cannot be written to {output_dir}: {first_line(error)}") from error

        checkpoints.Ranks().each(saved)
        self.longspan_saver.start(
            Path(output_dir).parent, self.state.global_step, self.model, _plain(self.optimizer), {},
            background=self.args.save_total_limit not in (1, 2), later=TRAINER_STATE_NAME,
        )  # fmt: skip

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """As the base class; ranks that read the same batches draw alike also after a resume on another mesh.

        The base class leaves a rank without a file of its own as it was seeded. Collective.
        """
        super()._load_rng_state(checkpoint)
        if checkpoint is None or not self.longspan_sharded:
            return
        saved = (Path(checkpoint) / f"rng_state_{self.args.process_index}.pth").is_file()
        states = checkpoints.Ranks().gather((saved, random.getstate(), np.random.get_state(), torch.get_rng_state()))
        first = states[self.longspan_sp.data_rank * self.longspan_sp.model_size]
        _, of_python, of_numpy, of_torch = first if first[0] else states[0]
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As the base class; `resume_from_checkpoint=True` resumes from the newest undamaged checkpoint."""
        run = Path(self.args.output_dir)
        if resume_from_checkpoint is True:
            # Without any folder of a checkpoint the base class raises; with incomplete ones alone it starts anew.
            resume_from_checkpoint = checkpoints.checkpoint_to_resume(run) or not newest_first(run)
        try:
            with checkpoints.locked(run):
                trained = super().train(resume_from_checkpoint, *args, **kwargs)
                self.longspan_saver.finish()
            return trained
        finally:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, Figures | StopOnSignal):
                    callback.close()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the base class; a step with what a callback `Figures` adds."""
        for callback in self.callback_handler.callbacks if "loss" in logs else ():
            logs |= callback.take() if isinstance(callback, Figures) else {}
        super().log(logs, *args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        schedule = self.lr_scheduler.state_dict()
        checkpoints.Ranks().first(lambda: _write(schedule, Path(output_dir) / "scheduler.pt"))

    def longspan_load(self, checkpoint: str) -> None:
        """Load the weights of a checkpoint of this run. Collective."""
        checkpoints.load_weights(checkpoint, self.model)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.longspan_load(resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the sharded state. Its files were verified when the weights were loaded."""
        if checkpoint is None:
            return
        verified = replace(checkpoints.read_verified(checkpoint, content=False), verified=True)
        checkpoints.load(verified, self.model, _plain(self.optimizer))
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True))

    def _load_best_model(self) -> None:
        """As the base class; if the best checkpoint is damaged, warn and keep the last weights."""
        self.longspan_saver.finish()
        best = str(self.state.best_model_checkpoint)
        try:
            self.longspan_load(best)
        except LongspanError as error:
            if self.args.should_save:
                text = f"the best checkpoint cannot be loaded, so the model keeps its last weights: {error}"
                print(f"longspan: {text}", file=sys.stderr, flush=True)


def _write(value: Any, path: Path) -> None:
    """Write a pickle of torch; a full disk is an OSError, which it is not when torch writes the file."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    try:
        path.write_bytes(buffer.getbuffer())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _plain(optimizer: Any) -> Any:
    """Return the optimizer inside accelerate's wrappers."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


@dataclass
class _Step:
    """The step in progress, or the last one."""

    batches: list[tuple[dict[str, Any], Any, tuple[Any, ...]]] = field(default_factory=list)
    """Inputs, items, and states of the random generators, of the micro-batches."""
    losses: list[Tensor] = field(default_factory=list)
    norm: Any = None  # of the gradients
    complete: bool = False


def _gathered(outputs: Any, sp: SequenceSharding, length: int) -> Any:
    """Gather every tensor of local tokens; return others unchanged."""
    if isinstance(outputs, tuple | list):
        return type(outputs)(_gathered(x, sp, length) for x in outputs)
    if isinstance(outputs, Tensor) and outputs.dim() > 1 and outputs.shape[1] == len(sp.positions(length)):
        return sp.gather(outputs, dim=1, length=length)
    return outputs
