"""The messages of rings and of FSDP, matched in order as NCCL matches them: none hangs, and none is mixed up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import longspan
from tests.attn.schedule import Group, Message, Step, faults, record
from tests.choose import confirming, each_value, grouped
from tests.fakes import fake_world
from tests.oracle import Case, make, options

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
    """Return what this rank posts for one attention of each case: one by one, and as the layers of one model."""
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
    """Return `programs_of` every rank of a fake world, one after the other."""
    found = []
    for rank in range(ring * ulysses):
        with fake_world(rank, ring * ulysses):
            sp = longspan.SequenceSharding(longspan.init_mesh(ring=ring, ulysses=ulysses), **how)
            found.append(programs_of(cases, sp))
    return found


def check(found: list[tuple[list[Program], Program]]) -> int:
    """Check every case alone, and all as layers of a model; return the number of messages sent."""
    for programs in zip(*(alone for alone, _ in found), strict=True):
        assert faults(programs) == []
    layers = [layers for _, layers in found]
    assert faults(layers) == []
    return sum(message.sends for program in layers for step in program for message in step.messages)


MESHES = [(2, 1), (3, 1), (4, 1), (2, 2), (2, 4), *confirming([(5, 1), (8, 1), (3, 2)])]


@pytest.mark.parametrize(("layout", "ring", "ulysses"), each_value(["zigzag", "contiguous"], grouped(MESHES)))
def test_every_send_matches_its_receive_and_no_rank_waits_forever(ring: int, ulysses: int, layout: str) -> None:
    sent = check(fake_programs(ring, ulysses, list(MASKS.values()), layout=layout))
    # A causal layer alone sends each block's keys and values, and their gradients, ring - 1 times.
    assert sent >= ulysses * 3 * (ring - 1)


@settings(max_examples=12)
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
    check(fake_programs(ring, 1, layers, layout=layout))


# ---------------------------------------------------------------------------------------------------------------------
# Real ranks post what fake ranks post.


def _real_programs(ring: int, layout: str) -> tuple[list[Program], Program]:
    mesh = longspan.init_mesh(ring=ring, ulysses=dist.get_world_size() // ring)
    return programs_of(list(MASKS.values()), longspan.SequenceSharding(mesh, layout))


@pytest.mark.parametrize(("world", "ring"), [(4, 4), (4, 2), *confirming([(2, 2), (8, 4)])])
def test_ranks_over_gloo_post_the_same(get_pool: Any, world: int, ring: int) -> None:
    real = get_pool(world).run(_real_programs, ring, "zigzag")
    check(real)
    assert real == fake_programs(ring, world // ring, list(MASKS.values()), layout="zigzag")


# ---------------------------------------------------------------------------------------------------------------------
# A training step: FSDP's collectives, all-to-alls and the ring, layers with different masks, recomputed.


def _step_programs(data: int, ring: int, ulysses: int, **config: Any) -> list[Program]:
    import transformers

    programs = []
    for rank in range(data * ring * ulysses):
        with fake_world(rank, data * ring * ulysses):
            mesh = longspan.init_mesh(data=data, ring=ring, ulysses=ulysses)
            sp = longspan.SequenceSharding(mesh)
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
# `faults` detects each fault.

RING: Group = ("mesh_ring", (0, 1))


def send(peer: int, size: int = 8, tag: int = 0) -> Message:
    return Message(True, peer, size, "float32", tag)


def receive(peer: int, size: int = 8, tag: int = 0) -> Message:
    return Message(False, peer, size, "float32", tag)


def batch(*messages: Message, group: Group = RING) -> Step:
    return Step(group, messages)


def test_matching_messages_are_no_fault() -> None:
    assert faults([[batch(send(1), receive(1))], [batch(receive(0), send(0))]]) == []
    assert faults([[batch(send(1)), batch(receive(1))], [batch(receive(0)), batch(send(0))]]) == []


@pytest.mark.parametrize(
    ("programs", "text"),
    [
        ([[batch(send(1))], []], "message 0 has no other side: rank 0, step 0: send to 1"),
        ([[batch(send(1, 8), send(1, 16, 1))], [batch(receive(0, 16, 1), receive(0, 8))]], "(8, 'float32', 0) where"),
        # Each waits for a message that the other would send afterwards.
        ([[batch(send(1)), batch(receive(1))], [batch(send(0)), batch(receive(0))]], "rank 0 waits for [1] in step 0"),
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
def test_faults_are_detected(programs: list[Program], text: str) -> None:
    assert text in "\n".join(faults(programs))


def test_a_circular_wait_of_three_ranks_is_detected() -> None:
    group: Group = ("mesh_ring", (0, 1, 2))
    ring = [[batch(send((r + 1) % 3), group=group), batch(receive((r - 1) % 3), group=group)] for r in range(3)]
    assert len(faults(ring)) == 3
    ring[0].reverse()  # one rank receives first
    assert faults(ring) == []
