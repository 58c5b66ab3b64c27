"""Elastic batches: each sample on as many ranks as it needs, with the loss and every gradient of one process."""

from __future__ import annotations

import ast
import functools
import inspect
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import longspan
from longspan.core.errors import LongspanError
from longspan.core.parallel import groups_of_widths
from longspan.elastic.batches import ElasticStep, sample_of, samples_of_batch
from longspan.elastic.scheduler import Group
from longspan.plan.cost.peak_memory import peak_memory
from longspan.plan.from_model import shape_of_model
from longspan.plan.hardware import ALL_TO_ALL_BYTES, CATALOGUE, COMMUNICATOR_BYTES
from longspan.plan.job import CostContext, Job
from tests.choose import confirming
from tests.elastic.samples import IGNORE, Samples, labels_of, samples_of
from tests.fakes import fake_world
from tests.models import Run, Truth, build, check_gradients, check_loss, gradients, ropes, sharding, truth_by
from tests.pool import RankPool, on_ranks

NCCL_ALONE = "cuda:nccl" if "backend" in inspect.signature(dist.split_group).parameters else None


def one_process(model: Any, samples: Samples, first: int = 1) -> Run:
    """Return the mean loss over the labels of all samples, each in a forward of its own, and its gradients."""
    items, total = labels_of(samples, first), 0.0
    for sample in samples:
        ids, labels = (torch.tensor([sample[key]]) for key in ("input_ids", "labels"))
        if getattr(model.config, "rope_parameters", {}).get("rope_type") == "dynamic":
            with torch.no_grad():
                model(input_ids=ids[:, :1])  # transformers remembers the longest sequence so far until a short one
        if first:
            loss = model(input_ids=ids, labels=labels, num_items_in_batch=items, use_cache=False).loss
        else:  # a masked LM divides by its own labels
            logits = model(input_ids=ids).logits
            loss = torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum") / items
        loss.backward()
        total += float(loss.detach())
    return Run(total, torch.zeros(1), gradients(model), None)


def run_step(model: Any, sp: longspan.SequenceSharding, samples: Samples, room: int) -> tuple[float, ElasticStep]:
    """Run forward and backward of all samples in one step."""
    loader = longspan.elastic_batches(samples, sp, model, tokens_per_step=10**6, tokens_per_rank=room)
    (step,) = loader
    total = 0.0
    for batch in step:
        loss = model(**batch).loss
        loss.backward()
        total += float(loss.detach())
    return total, step


def rounds_of(step: ElasticStep) -> list[list[Group]]:
    return [list(groups) for groups in step.schedule.rounds]


Case = tuple[tuple[int, ...], int]  # lengths, tokens_per_rank
LONG = {"max_position_embeddings": 4096}


def _equals_one_process(
    truths: list[Any], family: str, cases: list[Case], mesh: dict[str, int], options: dict[str, Any]
) -> list[list[list[Group]]]:
    config = options.pop("config", LONG)
    sp = longspan.SequenceSharding(longspan.init_mesh(**mesh))
    model = longspan.parallelize(build(family, **config), sp, **options)
    found = []
    for truth, (lengths, room) in zip(truths, cases, strict=True):
        loss, step = run_step(model, sp, samples_of(lengths), room)
        check_loss(loss, truth)
        check_gradients(gradients(model), truth)
        model.zero_grad()
        assert (step.tokens, step.label_tokens) == (sum(lengths), labels_of(samples_of(lengths), family != "Bert"))
        found.append(rounds_of(step))
    return found


@functools.cache
def _truth(family: str, config: str, lengths: tuple[int, ...]) -> Truth:
    model = build(family, **ast.literal_eval(config))
    return truth_by(model, lambda m: one_process(m, samples_of(lengths), int(family != "Bert")))


def _check(pool: RankPool, family: str, mesh: dict[str, int], *cases: Case, **options: Any) -> list[list[list[Group]]]:
    """Compare each case with one process, and return the rounds of each."""
    truths = [_truth(family, repr(options.get("config", LONG)), lengths) for lengths, _ in cases]
    first, *others = pool.run(_equals_one_process, truths, family, list(cases), mesh, options)
    assert all(other == first for other in others)
    return first  # type: ignore[no-any-return]


def widths(rounds: list[list[Group]]) -> set[int]:
    return {group.width for groups in rounds for group in groups}


SHORT: Case = ((3, 64, 1, 9, 20, 5, 2, 17, 41, 8, 4, 6, 12, 14, 11, 7), 40)
FULL_RANGE: Case = ((3000, 1400, 1300, 700, 30, 700, 55, 210, 120, 90, 500, 450, 300), 600)


@pytest.mark.parametrize("mesh", [{"ulysses": 4}, {"ring": 4}, {"ulysses": 2, "ring": 2}, {"ulysses": 2, "data": 2}])
def test_equals_one_process(pool4: RankPool, mesh: dict[str, int]) -> None:
    (rounds,) = _check(pool4, "Llama", mesh, SHORT, fsdp=mesh != {"ring": 4})
    assert len(widths(rounds)) > 1


def test_two_ranks(pool2: RankPool) -> None:
    _check(pool2, "Mixtral", {"ulysses": 2}, SHORT, fsdp=False)


@pytest.mark.parametrize(("family", "fsdp"), [("Llama", True), *confirming([("Mixtral", False)])])
def test_full_range(pool8: RankPool, family: str, fsdp: bool) -> None:
    """Lengths from 30 to 3,000 on 8 ranks."""
    config = {**LONG, "num_hidden_layers": 1}  # slow in one process
    (rounds,) = _check(pool8, family, {"ulysses": 4, "ring": 2}, FULL_RANGE, config=config, fsdp=fsdp)
    assert widths(rounds) == {4, 8}


# What depends on the whole sequence in another way: windows, chunks and positions of a layer, recurrent layers, labels
# that are not shifted, a tensor axis, memory options. Three samples on two replicas leave one idle in the last round.
TENSOR = {"data": 2, "tensor": 2}
OTHERS: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "Llama4Text": ("Llama4Text", {}, {}),
    "Bert": ("Bert", {}, {}),
    "Qwen3Next": ("Qwen3Next", {}, {}),
    "Mamba2": ("Mamba2", {}, {"fsdp": False}),
    "tensor": ("Llama", TENSOR, {}),
    "megatron-sp": ("Llama", TENSOR, {"tensor_style": "megatron-sp"}),
    "longest": ("Llama", {}, {"memory": "longest"}),
    "experts": ("Mixtral", {}, {"experts": 4, "memory": "longest"}),  # tokens go to ranks that compute other samples
    "auto": ("Llama", {}, {"memory": "auto"}),
    # Frequencies follow from each sample's own length; the first step has samples of 1 to 64 tokens.
    "dynamic": ("Llama", {}, {"config": ropes("dynamic", 16)}),
    "longrope": ("Llama", {}, {"config": ropes("longrope", 4096)}),
}


@pytest.mark.parametrize("case", OTHERS)
def test_others(pool4: RankPool, case: str) -> None:
    family, mesh, options = OTHERS[case]
    fewer = SHORT[0][2:8], 20
    short, odd = (fewer, ((18, 20, 16), 20)) if mesh else (SHORT, ((38, 40, 36), 20))
    if "config" not in options:  # the others run all lengths above
        short = fewer
    rounds = _check(pool4, family, mesh or {"data": 2, "ulysses": 2}, short, odd, **options)[1]
    assert [sum(group.width for group in groups) for groups in rounds] == ([2, 1] if mesh else [4, 2])


# --- a router's loss, and idle ranks


def _of_round(model: Any, samples: Samples, items: int) -> Any:
    """Return CE over all labels of the step plus the round's share of the router loss, from one packed row."""
    ids = torch.tensor([[token for sample in samples for token in sample["input_ids"]]])
    labels = torch.tensor([[t for sample in samples for t in (IGNORE, *sample["labels"][1:])]])
    positions = torch.tensor([[i for sample in samples for i in range(len(sample["input_ids"]))]])
    out = model(input_ids=ids, labels=labels, position_ids=positions, num_items_in_batch=items, use_cache=False,
                output_router_logits=True)  # fmt: skip
    weight = model.router_aux_loss_coef
    return out.loss - weight * out.aux_loss + weight * labels_of(samples) / items * out.aux_loss


def _rounds_in_one_process(model: Any, samples: Samples, rounds: list[list[int]]) -> Run:
    total = 0.0
    for chosen in rounds:
        loss = _of_round(model, [samples[i] for i in chosen], labels_of(samples))
        loss.backward()
        total += float(loss.detach())
    return Run(total, torch.zeros(1), gradients(model), None)


ROUTED = (38, 40, 36)


def _routed(room: int, truth: Any, fsdp: bool) -> list[list[Group]]:
    sp = sharding(data=2)
    model = longspan.parallelize(build("Mixtral", output_router_logits=True, router_aux_loss_coef=0.3), sp, fsdp=fsdp)
    loss, step = run_step(model, sp, samples_of(ROUTED), room)
    if truth is not None:
        check_loss(loss, truth)
        check_gradients(gradients(model), truth)
    return rounds_of(step)


def test_router_loss_and_idle_ranks(pool4: RankPool) -> None:
    rounds = pool4.run(_routed, 20, None, True)[0]
    idle = [groups for groups in rounds if sum(group.width for group in groups) < 4]
    assert idle and len(rounds) > 1, rounds
    chosen = [[i for group in groups for i in group.samples] for groups in rounds]
    model = build("Mixtral", output_router_logits=True, router_aux_loss_coef=0.3)
    truth = truth_by(model, lambda m: _rounds_in_one_process(m, samples_of(ROUTED), chosen))
    for fsdp in (True, False):
        assert pool4.run(_routed, 20, truth, fsdp)[0] == rounds


# --- the loader


def test_steps_do_not_depend_on_the_mesh_and_resume() -> None:
    """The order of samples, and where a step ends, follow from data and seed; a state continues with the next step."""
    sp, model = longspan.SequenceSharding(longspan.init_mesh()), build("Llama")
    samples = samples_of([5, 30, 8, 12, 40, 3, 9])

    def loader() -> Any:
        return longspan.elastic_batches(samples, sp, model, tokens_per_step=50, tokens_per_rank=40, epochs=2, seed=4)

    whole = list(loader())
    assert [step.tokens <= 50 for step in whole] == [True] * len(whole)
    assert sum(step.tokens for step in whole) == 2 * 107
    first, second = loader(), loader()
    for number, _ in enumerate(first):
        if number == 2:
            second.load_state_dict(first.state_dict())
            break
    left = [torch.cat([batch["input_ids"][0] for batch in step]) for step in second]
    expected = [torch.cat([batch["input_ids"][0] for batch in step]) for step in whole[3:]]
    assert len(left) == len(expected) and all(map(torch.equal, left, expected))
    other = longspan.elastic_batches(samples, sp, model, tokens_per_step=60, tokens_per_rank=40, seed=4)
    with pytest.raises(LongspanError, match=r"tokens_per_step=50, these batches have 60"):
        other.load_state_dict(first.state_dict())


def test_collated_batches() -> None:
    """Padded rows, packed documents and restarting positions become the same samples."""
    ids = torch.tensor([[5, 6, 7, 0], [8, 9, 10, 11]])
    mask = (ids > 0).long()
    padded = samples_of_batch({"input_ids": ids, "labels": ids, "attention_mask": mask})
    flat = ids[mask.bool()][None]
    packed = {"input_ids": flat, "labels": flat}
    positions = samples_of_batch({**packed, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]])})
    borders = samples_of_batch({**packed, "cu_seq_lens_q": torch.tensor([0, 3, 7])})
    for made in (padded, positions, borders):
        assert [sample.input_ids.tolist() for sample in made] == [[5, 6, 7], [8, 9, 10, 11]]
    with pytest.raises(LongspanError, match="this one has input_ids, labels, pixel_values"):
        samples_of_batch({"input_ids": ids, "labels": ids, "pixel_values": ids})


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ([1, 2], "item 7 of the data set must be"),
        ({"input_ids": [[1]]}, "`input_ids` of item 7 must be a row of integers"),
        ({"input_ids": [1.5]}, "`input_ids` of item 7 must be a row of integers"),
        ({"input_ids": [1, 2], "labels": [1]}, "2 input_ids and 1 labels"),
        ({"input_ids": [1, 2], "pixel_values": 1}, "has pixel_values"),
    ],
)
def test_bad_items(item: Any, message: str) -> None:
    with pytest.raises(LongspanError, match=message):
        sample_of(item, 7)


def test_positions_are_those_of_each_sample_alone() -> None:
    """RoBERTa's begin behind the id of padding."""
    sp, model = longspan.SequenceSharding(longspan.init_mesh()), build("Roberta")
    (step,) = longspan.elastic_batches(samples_of([4, 3]), sp, model, tokens_per_step=9, tokens_per_rank=9)
    assert [batch["position_ids"].tolist() for batch in step] == [[[1, 2, 3, 4, 1, 2, 3]]]


@on_ranks(2)
def test_log_probabilities_of_each_group() -> None:
    sp = sharding()
    model = longspan.parallelize(build("Llama"), sp).eval()
    sp.of_width(1)
    both = torch.arange(3, 11).view(2, 4)
    mine = {"input_ids": both[sp.rank, None], "sequence_width": 1}
    with torch.no_grad():
        expected = longspan.token_logprobs(model, {"input_ids": both}, gather=True)[sp.rank, None]
        torch.testing.assert_close(longspan.token_logprobs(model, mine, gather=True), expected)


# --- process groups


GROUPS = [
    [[rank, rank + 1] for rank in range(0, 64, 2)],
    [[*range(first, first + 4)] for first in range(0, 64, 4)],
    [[first + i, first + i + 8] for first in range(0, 64, 16) for i in range(8)],
    [[*range(first, first + 16)] for first in range(0, 64, 16)],
    [[first + i + 8 * j for j in range(4)] for first in (0, 32) for i in range(8)],
    [[*range(32)], [*range(32, 64)]],
]
"""Widths 2, 4, 16 and 32 of 8 x 8 ranks; the groups of width 8 are those of the mesh."""


@pytest.mark.parametrize("bound", [False, True])
def test_groups_of_all_widths(bound: bool) -> None:
    """A NCCL communicator is split once for all groups of a kind; without one, a rank makes its own groups only."""
    with fake_world(37, 64):
        sp = longspan.SequenceSharding(longspan.init_mesh(ring=8, ulysses=8, device_type="cpu"))
        new, default = dist.new_group, dist.distributed_c10d._get_default_group()

        def split(split_ranks: list[list[int]], **_: Any) -> Any:
            return new(next(ranks for ranks in split_ranks if 37 in ranks), use_local_synchronization=True)

        default.bound_device_id = torch.device("cuda", 0) if bound else None
        split_group = mock.create_autospec(dist.split_group, side_effect=split)
        with (
            mock.patch.object(dist, "new_group", side_effect=new) as new_group,
            mock.patch.object(dist.distributed_c10d, "new_group", new_group),
            mock.patch.object(dist, "split_group", split_group),
        ):
            sp.of_width(1)
        if bound:
            assert [call.kwargs["split_ranks"] for call in split_group.mock_calls] == GROUPS
            assert {call.kwargs.get("backend") for call in split_group.mock_calls} == {NCCL_ALONE}
            assert not new_group.called
        else:
            mine = [next(ranks for ranks in groups if 37 in ranks) for groups in GROUPS]
            assert new_group.mock_calls == [mock.call(ranks, use_local_synchronization=True) for ranks in mine]
            assert not split_group.called
        assert sp.of_width(8).ulysses_group is sp.ulysses_group
        assert sorted(ranks for _, ranks in groups_of_widths(sp.parallel)) == sorted(len(made[0]) for made in GROUPS)
        assert dist.get_process_group_ranks(sp.of_width(16).ring_group) == [37, 45]


def test_groups_are_planned() -> None:
    """On a tensor axis, a replica's ranks are a group of their own; NCCL's memory for all of them is in the plan."""
    mesh = {"ring": 3, "ulysses": 4, "tensor": 2}
    with fake_world(0, 24):
        sp = longspan.SequenceSharding(longspan.init_mesh(**mesh, device_type="cpu"))
        with mock.patch("longspan.comm.mesh.group_of_partition", return_value=sp.ulysses_group) as made:
            sp.of_width(1)
        found = [len(call.args[0][0]) for call in made.mock_calls]
    assert sorted(found) == sorted(ranks for _, ranks in groups_of_widths(sp.parallel))
    model, h100 = shape_of_model(build("Llama")), CATALOGUE["h100"]
    reserves = [
        peak_memory(CostContext(model, Job(64, parallel=sp.parallel, elastic=elastic)), h100)["reserve"]
        for elastic in (False, True)
    ]
    assert reserves == [2e9, 2e9 + len(found) * COMMUNICATOR_BYTES + (2 - 1) * ALL_TO_ALL_BYTES]


# --- what is refused, equally on every rank


def _refusals() -> None:
    sp = sharding()
    with pytest.raises(LongspanError, match=r"sequence_width=2.*call sp.of_width\(1\) on every rank first"):
        longspan.shard_batch({"input_ids": torch.ones(1, 4, dtype=torch.int64), "sequence_width": 2}, sp)
    model = longspan.parallelize(build("Llama"), sp)
    ids = torch.arange(3, 11)[None]
    batch = {"input_ids": ids, "labels": ids}
    mine = {key: x + sp.rank // 2 for key, x in batch.items()}  # two groups, two batches
    with pytest.raises(LongspanError, match=r"call sp.of_width\(1\) on every rank first"):
        model(**mine, sequence_width=2)
    with pytest.raises(LongspanError, match="sample 1 has 0 tokens|length of sample 1"):
        longspan.schedule([5, 0], sp, model, tokens_per_rank=8)
    with pytest.raises(LongspanError, match=r"sample 0 has 70 tokens, and 4 ranks of 16 tokens hold 64; .*at least 5"):
        longspan.schedule([70], sp, model, tokens_per_rank=16)
    with pytest.raises(LongspanError, match="rank 2 would schedule by other hardware than the rest"):
        longspan.schedule([5], sp, model, tokens_per_rank=8, gpu="h200" if sp.rank == 2 else "h100")
    with pytest.raises(LongspanError, match=r"rank 2 failed: .*h10.* is unknown"):
        longspan.schedule([5], sp, model, tokens_per_rank=8, gpu="h10" if sp.rank == 2 else None)
    with pytest.raises(LongspanError, match=r"3 ranks cannot share a sequence in a group of 4; allowed are 1, 2, 4"):
        model(**mine, sequence_width=3)
    # Neighbours that disagree about their group, or about its batch.
    with pytest.raises(LongspanError, match=r"`sequence_width` is .* on rank"):
        model(**batch, sequence_width=2 if sp.rank < 3 else 1)
    other = {key: x + (sp.rank == 1) for key, x in batch.items()}
    with pytest.raises(LongspanError, match=r"ranks 1 were given another one than ranks 0 .*other values"):
        model(**other, sequence_width=2)
    model(**mine, sequence_width=2).loss.backward()
    with pytest.raises(LongspanError, match=r"same full batch"):
        model(**mine)


def test_refusals(pool4: RankPool) -> None:
    pool4.run(_refusals)


@on_ranks(2)
def test_a_classifier_is_refused() -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, pad_token_id=0
    )
    sp = sharding()
    model = longspan.parallelize(transformers.LlamaForSequenceClassification(config), sp)
    sp.of_width(1)
    with pytest.raises(LongspanError, match="a loss of rows"):
        longspan.elastic_batches([], sp, model, tokens_per_step=8, tokens_per_rank=8)
    with pytest.raises(LongspanError, match="`sequence_width=1` chooses the ranks of one batch, but .* loss of rows"):
        model(input_ids=torch.ones(1, 4, dtype=torch.int64), sequence_width=1)
