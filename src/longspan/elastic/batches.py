"""Elastic batches: each sample is computed by as many ranks as its length needs.

    for step in longspan.elastic_batches(dataset, sp, model, tokens_per_step=65536, tokens_per_rank=4096):
        for batch in step:  # as many on every rank
            model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

The samples of a step become rounds (`longspan.elastic.scheduler`). In each round a rank gets the row of its group, with
`sequence_width`, the number of ranks that share it, and `num_items_in_batch`, the labels of all rounds. So the losses
of the rounds add to the mean over the labels of all samples, and their gradients to its gradient.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longspan.comm.agree import Facts, on_every_rank
from longspan.comm.arguments import describe
from longspan.comm.mesh import SequenceSharding
from longspan.compat.transformers_api import own_positions
from longspan.core.errors import LongspanError
from longspan.core.formatting import format_ranks, odd_ones
from longspan.core.memory import FASTEST
from longspan.core.validation import LARGEST_COUNT, check_number
from longspan.elastic.scheduler import Group, SampleCosts, Schedule, make_schedule
from longspan.hf.batch.documents import BORDER_KEYS, ID_KEYS, LONGEST_KEYS, segments_of, tokens_of
from longspan.hf.batch.shard import IGNORE, WIDTH
from longspan.hf.memory import hardware_of
from longspan.hf.model.support import transformers_model
from longspan.plan.from_model import shape_of_model
from longspan.plan.hardware import read_hardware
from longspan.plan.job import Job

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SAMPLE_KEYS = {"input_ids", "labels"}
_BATCH_KEYS = {*_SAMPLE_KEYS, "attention_mask", "position_ids", *ID_KEYS, *BORDER_KEYS, *LONGEST_KEYS}


@dataclass(frozen=True)
class Sample:
    """One sequence: int64 [tokens], with labels that are not shifted, -100 where there is no loss."""

    input_ids: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True)
class ElasticStep:
    """One rank's batches of one optimizer step, one for each round."""

    batches: tuple[dict[str, Any], ...]  # inputs of the model, one row each
    schedule: Schedule  # of all ranks; its samples are numbers within the step
    tokens: int  # of all samples
    label_tokens: int  # of all samples, by which the loss is divided

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Elastic:
    """Makes the steps of a model from samples; arguments are those of `schedule`. Collective."""

    def __init__(
        self, sp: SequenceSharding, model: nn.Module, tokens_per_rank: int, gpu: str | os.PathLike[str] | None = None
    ) -> None:
        check_number("tokens_per_rank", tokens_per_rank, 1, LARGEST_COUNT, whole=True)
        inner = transformers_model(model)
        if inner.loss_type == "ForSequenceClassification":
            raise LongspanError(f"{type(inner).__name__} has a loss of rows; elastic batches need a loss of tokens. "
                                f"Give every rank of a sequence group the same batch instead")  # fmt: skip
        self.sp, self.model, self.tokens_per_rank = sp, inner, tokens_per_rank
        self.shifts = inner.loss_type not in ("ForMaskedLM", "ForTokenClassification")
        self.own_positions = own_positions(inner)
        self.costs = sample_costs(inner, sp, gpu)
        if not sp.has_widths:
            sp.of_width(1)

    def step(self, samples: Sequence[Sample]) -> ElasticStep:
        """Return my batches of samples, which are the same on every rank."""
        made = make_schedule([len(sample) for sample in samples], self.costs, self.tokens_per_rank)
        labels = sum(int((sample.labels[int(self.shifts) :] != IGNORE).sum()) for sample in samples)
        mine = made.groups_of(self.sp.data_rank * self.sp.size + self.sp.rank)
        batches = tuple({**self._row(samples, group), "num_items_in_batch": max(1, labels)} for group in mine)
        return ElasticStep(batches, made, sum(map(len, samples)), labels)

    def _row(self, samples: Sequence[Sample], group: Group | None) -> dict[str, Any]:
        """Return a row of packed samples, or of one token of padding for an idle rank, which adds 0 to the loss."""
        if group is None:
            nothing = torch.zeros(1, 1, dtype=torch.int64, device=samples[0].input_ids.device)
            padding = {key: nothing for key in ("input_ids", "position_ids", "attention_mask")}
            return {**padding, "labels": nothing + IGNORE, WIDTH: 1}
        chosen = [samples[number] for number in group.samples]
        labels = torch.cat([sample.labels for sample in chosen])
        if self.shifts:  # no token of a sample predicts its first one
            starts = torch.tensor([0, *map(len, chosen[:-1])]).cumsum(0)
            labels[starts.to(labels.device)] = IGNORE
        ids = torch.cat([sample.input_ids for sample in chosen])
        positions = torch.cat([self._positions(sample) for sample in chosen])
        row = {"input_ids": ids[None], "labels": labels[None], "position_ids": positions[None]}
        return {**row, WIDTH: group.width}

    def _positions(self, sample: Sample) -> Tensor:
        """Return the position ids that the model gives to a sample alone: RoBERTa's do not begin at 0."""
        made = None if self.own_positions is None else self.own_positions({"input_ids": sample.input_ids[None]}, 0)
        return torch.arange(len(sample), device=sample.input_ids.device) if made is None else made[0]


def schedule(
    lengths: Sequence[int],
    sp: SequenceSharding,
    model: nn.Module,
    *,
    tokens_per_rank: int,
    gpu: str | os.PathLike[str] | None = None,
) -> Schedule:
    """Return which ranks compute which samples of a batch, in which round.

    Long samples get many ranks and short ones share a rank, so that in each round all ranks are busy about equally
    long, by the planner's costs. Equal arguments give equal schedules. Collective: ranks compare their hardware, and
    the first call with `sp` makes the process groups of all widths.

    Args:
        lengths: tokens of each sample.
        sp: the sharding of the model. A sample gets a divisor of `sp.size` ranks.
        model: a transformers model, sharded or not; the planner reads its sizes.
        tokens_per_rank: the most tokens of a rank in a round, limited by its memory.
        gpu: hardware by which times are computed: a name of `longspan plan --gpu`, or a file of `longspan bench`,
            which knows how fast your links are. Slow links make narrower groups. Default: this device, with the links
            of the catalogue.

    Raises:
        LongspanError: for a sample without tokens, or one that the ranks of a sequence group cannot hold, with the mesh
            that would; for a model whose loss is one of rows; for unknown hardware, or another on some rank.
    """
    return make_schedule(list(lengths), Elastic(sp, model, tokens_per_rank, gpu).costs, tokens_per_rank)


def elastic_batches(
    dataset: Any,
    sp: SequenceSharding,
    model: nn.Module,
    *,
    tokens_per_step: int,
    tokens_per_rank: int,
    epochs: int = 1,
    seed: int | None = None,
    gpu: str | os.PathLike[str] | None = None,
) -> ElasticBatches:
    """Return a loader of steps in which each sample is computed by as many ranks as its length needs.

    A step has the next samples of the data set, with at most `tokens_per_step` tokens, but at least one sample. Which
    these are depends on the data and the seed, not on the mesh. Every rank needs the same data set, and iterates over
    the same steps: `len(step)` batches, each for one forward and backward.

    A mixture of experts with a router loss counts it once per step, as the mean of its rounds, by their labels.

    Args:
        dataset: has a length and items `{"input_ids": ids}` with optional `labels` (unshifted, -100 for no loss): lists
            or tensors of integers.
        sp, model, tokens_per_rank, gpu: of `longspan.schedule`.
        tokens_per_step: most tokens of an optimizer step, of all ranks.
        epochs: passes over the data set.
        seed: shuffles each pass; None keeps the order.

    Returns:
        An iterable of `ElasticStep`. Its `state_dict()`, stored after a step, lets `load_state_dict` continue with the
        next one.

    Raises:
        LongspanError: as `longspan.schedule`; on iteration for an item that has no such tensors.
    """
    for name, value in (("tokens_per_step", tokens_per_step), ("epochs", epochs)):
        check_number(name, value, 1, LARGEST_COUNT, whole=True)
    if seed is not None:
        check_number("seed", seed, 0, 1 << 62, whole=True)
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise LongspanError(f"`dataset` needs a length and items by number, got {describe(dataset)}")
    return ElasticBatches(dataset, Elastic(sp, model, tokens_per_rank, gpu), tokens_per_step, epochs, seed)


class ElasticBatches:
    """The steps of a data set; see `elastic_batches`."""

    def __init__(self, dataset: Any, elastic: Elastic, tokens_per_step: int, epochs: int, seed: int | None) -> None:
        self.dataset, self.elastic, self.tokens_per_step = dataset, elastic, tokens_per_step
        self.epochs, self.seed = epochs, seed
        self.epoch = self.used = 0

    def __iter__(self) -> Iterator[ElasticStep]:
        while self.epoch < self.epochs:
            order = self._order()
            while self.used < len(order):
                samples, tokens = list[Sample](), 0
                for index in order[self.used :]:
                    sample = sample_of(self.dataset[index], index)
                    if samples and tokens + len(sample) > self.tokens_per_step:
                        break
                    samples.append(sample)
                    tokens += len(sample)
                self.used += len(samples)
                yield self.elastic.step(samples)
            self.epoch, self.used = self.epoch + 1, 0

    def _order(self) -> list[int]:
        count = len(self.dataset)
        if self.seed is None:
            return list(range(count))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(count, generator=generator).tolist()

    def state_dict(self) -> dict[str, Any]:
        """Return where the next step begins, as plain values."""
        return {"epoch": self.epoch, "used": self.used, "seed": self.seed, "tokens_per_step": self.tokens_per_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was made.

        Raises:
            LongspanError: if the seed or the tokens of a step differ, so that the steps would.
        """
        for name in ("seed", "tokens_per_step"):
            if state[name] != getattr(self, name):
                raise LongspanError(f"the state was made with {name}={state[name]}, these batches have "
                                    f"{getattr(self, name)}; give the same")  # fmt: skip
        self.epoch, self.used = state["epoch"], state["used"]


def sample_of(item: Any, index: int) -> Sample:
    """Return an item of a data set as a sample.

    Raises:
        LongspanError: if it is not a mapping of token ids and labels of one length.
    """
    if not isinstance(item, Mapping) or item.get("input_ids") is None:
        raise LongspanError(f"item {index} of the data set must be {{'input_ids': ids}}, got {describe(item)}")
    unknown = sorted(key for key in item.keys() - _SAMPLE_KEYS if item[key] is not None)
    if unknown:
        raise LongspanError(f"item {index} of the data set has {', '.join(unknown)}; elastic batches take input_ids "
                            f"and labels")  # fmt: skip
    ids = _row_of(item["input_ids"], "input_ids", index)
    labels = ids if item.get("labels") is None else _row_of(item["labels"], "labels", index)
    if len(labels) != len(ids):
        raise LongspanError(f"item {index} of the data set has {len(ids)} input_ids and {len(labels)} labels; give "
                            f"one label for each token, -100 for no loss")  # fmt: skip
    return Sample(ids, labels)


def _row_of(values: Any, name: str, index: int) -> Tensor:
    try:
        row = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        row = torch.empty(0, 0)
    if row.dim() != 1 or row.is_floating_point() or row.is_complex():
        raise LongspanError(f"`{name}` of item {index} must be a row of integers, got {describe(values)}")
    return row.to(torch.int64)


def samples_of_batch(batch: Mapping[str, Any]) -> list[Sample]:
    """Return the sequences of a collated batch, padded or packed: each row without its padding, or each document.

    Raises:
        LongspanError: for keys that are not per token, or a mask with zeros between the ones of a row.
    """
    unknown = sorted(key for key in batch.keys() - _BATCH_KEYS if batch[key] is not None)
    if unknown or batch.get("input_ids") is None or batch.get("labels") is None:
        raise LongspanError(
            f"an elastic batch has input_ids, labels and marks of padding or documents; this one has "
            f"{', '.join(sorted(batch))}"
        )
    ids, labels = tokens_of(batch), batch["labels"]
    rows, _, holes = segments_of(batch, batch.get("position_ids"), *ids.shape)
    if holes is not None:
        raise LongspanError(
            "`attention_mask` has zeros between the ones of a row; move padding to the ends of the rows"
        )
    rows = rows or (((0, ids.shape[1]),),) * len(ids)
    return [Sample(ids[b, a:z], labels[b, a:z]) for b, row in enumerate(rows) for a, z in row]


def sample_costs(model: PreTrainedModel, sp: SequenceSharding, gpu: str | os.PathLike[str] | None) -> SampleCosts:
    """Return the costs of samples, for a model that is, or will be, sharded over `sp` by FSDP. Collective."""

    def differ(every: list[str], ranks: list[int]) -> LongspanError:
        odd = format_ranks([ranks[i] for i in odd_ones(every)])
        return LongspanError(
            f"{odd} would schedule by other hardware than the rest, and so differently (gpu={gpu!r}); give every rank "
            f"the same name or file"
        )

    hardware = on_every_rank(
        lambda: hardware_of(sp.device) if gpu is None else read_hardware(gpu),
        sp.host_group,
        lambda hardware: Facts(repr(dataclasses.replace(hardware, memory_bytes=1.0)), differ),
    )
    state = getattr(model, "longspan_state", None)
    job = Job(
        context=1,
        dtype="fp32" if next(model.parameters()).dtype == torch.float32 else "bf16",
        weight_sharding=sp.fsdp_size > 1 and (state is None or state.gradients is None),
        memory=FASTEST if state is None else state.memory.options,
        parallel=sp.parallel,
    )
    try:
        shape = shape_of_model(model)
    except LongspanError:  # a family or a layer that the planner does not know
        shape = None
    return SampleCosts(shape, job, hardware)
