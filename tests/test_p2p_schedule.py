"""The messages of rings, FSDP's collectives among them, matched in order as NCCL would: no hang, no mix-up."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import longspan
from tests.fakes import fake_world
from tests.oracle import Case, make, options
from tests.schedule import Group, Message, Step, faults, record

N = 37
CUTS = (0,) * 9 + (1,) * 3 + (2,) * 14 + (3,) * 11
MASKS = {
    "causal": Case(n=N),
    "bidirectional": Case(n=N, causal=False),
    "window": Case(n=N, window=5),
    "long window": Case(n=N, window=14, batch=2),
    "window to both sides": Case(n=N, window=6, causal=False),
    "chunks": Case(n=N, chunk_size=9),
    "prefix": Case(n=N, prefix=12),
    "documents": Case(n=N, documents=CUTS),
    "documents, in a window, both ways": Case(n=N, documents=CUTS, window=4, causal=False),
    "padding in front and behind": Case(n=N, documents=(-1,) * 11 + (0,) * 19 + (-1,) * 7),
    "fewer tokens than ranks": Case(n=5, sinks=True),
    "heads in uneven groups": Case(n=N, q_heads=6, kv_heads=3, window=20),
    "keys of another length": Case(n=9, kv_n=N, q_start=N - 9, window=11),
    "cross attention": Case(n=N, kv_n=14, causal=False),
    "a mask function": Case(n=N, mod="striped"),
}

Program = list[Step]


def programs_of(cases: list[Case], sp: longspan.SequenceSharding) -> tuple[list[Program], Program]:
    """What this rank posts for one attention of each case: one by one, and as the layers of one model."""
    alone, layers, outs = [], [], []
    for case in cases:
        x = make(case)
        leaves = [x[name].requires_grad_() for name in "qkv"]
        q, k, v = (sp.shard(leaf) for leaf in leaves)
        with record() as forward:
            outs.append(longspan.attention(q, k, v, sp, sinks=x.get("sinks"), **options(case, x)))
        alone.append(forward)
        layers += forward
    for steps, out in reversed(list(zip(alone, outs, strict=True))):
        with record() as backward:
            out.sum().backward()
        steps += backward
        layers += backward
    return alone, layers


def fake_programs(ring: int, ulysses: int, cases: list[Case], **how: Any) -> list[tuple[list[Program], Program]]:
    """`programs_of` on every rank of a world that is not there, one after the other."""
    found = []
    for rank in range(ring * ulysses):
        with fake_world(rank, ring * ulysses):
            sp = longspan.SequenceSharding(longspan.init_mesh(ring=ring, ulysses=ulysses), **how)
            found.append(programs_of(cases, sp))
    return found


def check(found: list[tuple[list[Program], Program]]) -> int:
    """Every case alone, and all of them as layers; how many messages they send."""
    for programs in zip(*(alone for alone, _ in found), strict=True):
        assert faults(programs) == []
    layers = [layers for _, layers in found]
    assert faults(layers) == []
    return sum(message.sends for program in layers for step in program for message in step.messages)


MESHES = [(ring, 1) for ring in range(2, 9)] + [(2, 2), (3, 2), (4, 2), (2, 4)]


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize(("ring", "ulysses"), MESHES)
def test_every_message_meets_its_own_and_no_rank_waits_for_ever(ring: int, ulysses: int, layout: str) -> None:
    sent = check(fake_programs(ring, ulysses, list(MASKS.values()), layout=layout, ring_impl="p2p"))
    # A causal layer alone sends each block's keys and values, and their gradients, ring - 1 times.
    assert sent >= ulysses * 3 * (ring - 1)


@pytest.mark.parametrize("ring", [2, 3, 8])
def test_all_gathered_blocks(ring: int) -> None:
    assert check(fake_programs(ring, 1, list(MASKS.values()), ring_impl="allgather")) == 0


@settings(max_examples=25)
@given(
    ring=st.integers(2, 7),
    n=st.integers(1, 60),
    window=st.none() | st.integers(1, 30),
    causal=st.booleans(),
    cuts=st.lists(st.integers(0, 60), max_size=5),
    layout=st.sampled_from(["zigzag", "contiguous"]),
)
def test_drawn_masks(ring: int, n: int, window: int | None, causal: bool, cuts: list[int], layout: str) -> None:
    ids = tuple(sum(i >= c for c in cuts) for i in range(n))
    layers = [Case(n=n, window=window, causal=causal, documents=ids), Case(n=n), Case(n=n, window=window)]
    check(fake_programs(ring, 1, layers, layout=layout, ring_impl="p2p"))


# ---------------------------------------------------------------------------------------------------------------------
# What is simulated is what real ranks post.


def _real_programs(ring: int, layout: str) -> tuple[list[Program], Program]:
    mesh = longspan.init_mesh(ring=ring, ulysses=dist.get_world_size() // ring)
    return programs_of(list(MASKS.values()), longspan.SequenceSharding(mesh, layout, ring_impl="p2p"))


@pytest.mark.parametrize(
    ("world", "ring"), [(2, 2), (4, 4), (4, 2), *(pytest.param(8, r, marks=pytest.mark.slow) for r in (8, 4))]
)
def test_ranks_over_gloo_post_the_same(get_pool: Any, world: int, ring: int) -> None:
    real = get_pool(world).run(_real_programs, ring, "zigzag")
    check(real)
    assert real == fake_programs(ring, world // ring, list(MASKS.values()), layout="zigzag", ring_impl="p2p")


# ---------------------------------------------------------------------------------------------------------------------
# A whole training step: FSDP's collectives, the exchange and the ring, layers of different masks, recomputed.


def _step_programs(data: int, ring: int, ulysses: int, **config: Any) -> list[Program]:
    import transformers

    programs = []
    for rank in range(data * ring * ulysses):
        with fake_world(rank, data * ring * ulysses):
            mesh = longspan.init_mesh(data=data, ring=ring, ulysses=ulysses)
            sp = longspan.SequenceSharding(mesh, ring_impl="p2p")
            made = transformers.CONFIG_MAPPING[config["model_type"]](
                vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
                num_key_value_heads=2, head_dim=8, max_position_embeddings=256, **config,
            )  # fmt: skip
            model = transformers.AutoModelForCausalLM.from_config(made)
            model = longspan.parallelize(model, sp, fsdp=True)
            model.gradient_checkpointing_enable()
            model.train()
            tokens = torch.zeros(1, N, dtype=torch.long)
            with record() as steps:
                for _ in range(2):
                    model(input_ids=tokens, labels=tokens).loss.backward()
            programs.append(steps)
    return programs


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("mesh", "config"),
    [
        ((1, 4, 1), {"model_type": "llama"}),
        ((1, 3, 2), {"model_type": "mistral", "sliding_window": 8}),
        ((2, 2, 1), {"model_type": "gemma3_text", "sliding_window": 8, "layer_types": [SLIDING, FULL, SLIDING]}),
    ],
)  # fmt: skip
def test_two_steps_of_a_model_under_fsdp(mesh: tuple[int, int, int], config: dict[str, Any]) -> None:
    programs = _step_programs(*mesh, **config)
    assert faults(programs) == []
    collectives = {step.collective.split(" of ")[0] for step in programs[0]}
    assert any("gather" in name for name in collectives) and any("scatter" in name for name in collectives)
    assert sum(len(step.messages) for step in programs[0]) > 2 * 3 * 2  # steps, layers, forward and recomputed


# ---------------------------------------------------------------------------------------------------------------------
# The simulator finds what it is for.

RING: Group = ("mesh_ring", (0, 1))


def send(peer: int, size: int = 8, tag: int = 0) -> Message:
    return Message(True, peer, size, "float32", tag)


def receive(peer: int, size: int = 8, tag: int = 0) -> Message:
    return Message(False, peer, size, "float32", tag)


def batch(*messages: Message, group: Group = RING) -> Step:
    return Step(group, messages)


def test_messages_that_meet_are_no_fault() -> None:
    assert faults([[batch(send(1), receive(1))], [batch(receive(0), send(0))]]) == []
    assert faults([[batch(send(1)), batch(receive(1))], [batch(receive(0)), batch(send(0))]]) == []


@pytest.mark.parametrize(
    ("programs", "said"),
    [
        ([[batch(send(1))], []], "message 0 has no other side: rank 0, step 0: send to 1"),
        ([[], [batch(receive(0))]], "message 0 has no other side: rank 1"),
        ([[batch(send(1, 8), send(1, 16, 1))], [batch(receive(0, 16, 1), receive(0, 8))]], "(8, 'float32', 0) where"),
        ([[batch(send(1), send(1, tag=1))], [batch(receive(0, tag=1), receive(0))]], "'float32', 1) where it is rec"),
        # Each waits for a message that the other would send afterwards.
        ([[batch(send(1)), batch(receive(1))], [batch(send(0)), batch(receive(0))]], "rank 0 waits for [1] in step 0"),
        # In another communicator it is not the same message.
        ([[batch(send(1))], [batch(receive(0), group=("other", (0, 1)))]], "has no other side"),
        ([[Step(RING, collective="barrier")], []], "collective 0 is barrier and nothing"),
        ([[Step(RING, collective="a")], [Step(RING, collective="b")]], "collective 0 is a and b"),
        (
            [[Step(RING, (), "all_to_all", (0, 8), (0, 4))], [Step(RING, (), "all_to_all", (4, 0), (16, 0))]],
            "8 bytes from 0 to 1, which expects 16",
        ),
        (
            [[Step(RING, collective="a"), batch(send(1))], [batch(receive(0)), Step(RING, collective="a")]],
            "rank 1 waits for [0] in step 0",
        ),
    ],
)  # fmt: skip
def test_a_fault_is_found(programs: list[Program], said: str) -> None:
    assert said in "\n".join(faults(programs))


def test_a_circle_of_three_is_found() -> None:
    group: Group = ("mesh_ring", (0, 1, 2))
    around = [[batch(send((r + 1) % 3), group=group), batch(receive((r - 1) % 3), group=group)] for r in range(3)]
    assert len(faults(around)) == 3
    around[0].reverse()  # one of them receives first: it goes round
    assert faults(around) == []


@pytest.mark.parametrize("ring", [2, 3])
def test_a_fault_anywhere_in_a_real_ring_is_found(ring: int) -> None:
    """Every message of a ring, left out; every pair in one batch with the same peer, swapped; every step moved."""
    layers = [MASKS["causal"], MASKS["window"], MASKS["documents"]]
    programs = [program for _, program in fake_programs(ring, 1, layers, ring_impl="p2p")]
    planted = messages = 0
    for rank, program in enumerate(programs):
        messages += sum(len(step.messages) for step in program)
        for number, step in enumerate(program):
            for broken in _broken(step):
                wrong = [list(p) for p in programs]
                wrong[rank][number] = broken
                assert faults(wrong), (rank, number, broken)
                planted += 1
        last = [step for step in program if step.messages][-1]
        wrong = [list(p) for p in programs]
        wrong[rank].remove(last)
        wrong[rank].insert(0, last)
        assert faults(wrong), (rank, "the last step first")
    assert planted >= messages > 30


def _broken(step: Step) -> list[Step]:
    found = [
        dataclasses.replace(step, messages=step.messages[:i] + step.messages[i + 1 :])
        for i in range(len(step.messages))
    ]
    for i, j in itertools.combinations(range(len(step.messages)), 2):
        a, b = step.messages[i], step.messages[j]
        if (a.sends, a.peer) == (b.sends, b.peer):
            swapped = list(step.messages)
            swapped[i], swapped[j] = b, a
            found.append(dataclasses.replace(step, messages=tuple(swapped)))
    return found
