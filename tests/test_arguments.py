"""Arguments of the public functions that a user can get wrong: refused in words, with the value and the way out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import longspan
from longspan import exchange, plan
from longspan.core.errors import LongspanError
from tests.chaos.api import fake_ranks

Q, K = torch.zeros(1, 8, 4, 8), torch.zeros(1, 8, 2, 8)
H100 = plan.read_hardware("h100")
IDS = torch.arange(8)[None]


@pytest.fixture
def sp() -> longspan.SequenceSharding:
    return longspan.SequenceSharding(longspan.init_mesh())


def _attend(**changes: Any) -> Callable[[Any], Any]:
    return lambda sp: longspan.attention(**{"q": Q, "k": K, "v": K, "sp": sp, **changes})


def _batch(**changes: Any) -> Callable[[Any], Any]:
    return lambda sp: longspan.shard_batch({"input_ids": IDS, **changes}, sp)


def _loss(**changes: Any) -> Callable[[Any], Any]:
    return lambda sp: longspan.causal_lm_loss(
        **{"logits": torch.zeros(1, 8, 5), "shifted_labels": IDS % 5, "sp": sp, **changes}
    )


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (_attend(q=None), r"`q` must be a tensor, got None \(NoneType\)"),
        (_attend(k=K.to("meta")), r"must be on one device, got q cpu, k meta, v cpu"),
        (_attend(sp="mesh"), r"`sp` must be a longspan.SequenceSharding, got 'mesh' \(str\)"),
        (_attend(causal="no"), r"causal must be True or False, got 'no'"),
        (_attend(length=0), r"length must be at least 1, got 0"),
        (_attend(length=8.0), r"length must be an integer at least 1"),
        (_attend(scale=math.nan), r"scale must be finite, got nan"),
        (_attend(softcap=math.inf), r"softcap=inf must be finite and above 0"),
        (_attend(softcap="30"), r"softcap='30' must be a number"),
        (_attend(dropout=None), r"dropout=None: attention dropout"),
        (_attend(sinks=3.0), r"`sinks` must be a tensor of 1 dimension, got 3.0"),
        (_attend(alibi=torch.zeros(2, 2)), r"`alibi` must be a tensor of 1 dimension, got .*\(2, 2\)"),
        (_attend(mask_mod=lambda b, h, q, kv: None), r"mask_mod must return a boolean tensor .*, it returned None"),
        (_attend(bias=lambda h, q, kv: None), r"bias must return a tensor for \(h, q, kv\), it returned None"),
        (_attend(bias=3), r"bias must be a function .*, got int"),
        (_attend(kernel=3), r"kernel=3 is neither a name .* nor a callable"),
        (_attend(prefix="ab"), r"prefix must be an integer, got 'ab'"),
        (_attend(documents=[0] * 8), r"`documents` must be a tensor, got \[0, "),
        (_attend(documents=torch.zeros(1, 8)), r"`documents` must be a tensor of integers, got a tensor torch.float32"),
        (_attend(cu_seqlens=torch.tensor([0.0, 8.0])), r"`cu_seqlens` must be a tensor of integers"),
        (lambda sp: longspan.explain_kernel(Q, K, None, sp), r"`v` must be a tensor"),
        (lambda sp: sp.shard([1, 2]), r"`x` must be a tensor, got \[1, 2\] \(list\)"),
        (lambda sp: sp.shard(Q, dim=4), r"`dim`=4 is no dimension of a tensor of shape \(1, 8, 4, 8\)"),
        (lambda sp: sp.shard(Q, dim=1.0), r"`dim`=1.0 is no dimension"),
        (lambda sp: sp.shard(Q, pad_value=None), r"`pad_value` must be a number, got None"),
        (lambda sp: sp.gather(Q, dim=-5), r"`dim`=-5 is no dimension"),
        (lambda sp: sp.gather(Q, length="8"), r"length must be an integer at least 1"),
        (lambda sp: sp.positions(-3), r"n must be at least 1, got -3"),
        (lambda sp: sp.positions(None), r"n must be an integer"),
        (lambda _: longspan.SequenceSharding(4), r"the mesh is 4 \(int\); use longspan.init_mesh"),
        (lambda sp: longspan.SequenceSharding(sp.mesh, layout=None), r"layout=None is unknown; choose 'auto'"),
        (lambda sp: longspan.SequenceSharding(sp.mesh, kv_replication=1), r"kv_replication must be True or False"),
        (lambda _: longspan.init_mesh(device_type="meta"), r"device_type='meta' is unknown; choose 'cpu' or 'cuda'"),
        (lambda _: exchange.seq_to_heads("x", None), r"`x` must be a tensor"),
        (lambda _: exchange.seq_to_heads(Q, "world"), r"`group` must be a process group or None, got 'world'"),
        (lambda _: exchange.reshard(Q, None, 1, "2"), r"has no two different dimensions 1 and '2'"),
        (lambda _: exchange.heads_to_seq(Q, None, heads=0), r"heads must be at least 1, got 0"),
        (lambda _: exchange.ring_shift(Q, None, hops=0.5), r"hops must be an integer"),
        (lambda sp: longspan.shard_batch([IDS], sp), r"a batch must be a dict of tensors, got \[tensor"),
        (lambda sp: longspan.shard_batch({"input_ids": IDS}, sp, shift=None), r"shift must be True or False, got None"),
        (_batch(labels=5), r"`labels` must be a tensor, got int"),
        (_loss(logits=torch.zeros(5)), r"`logits` must be a floating tensor \[batch, tokens, vocabulary\]"),
        (_loss(shifted_labels=torch.zeros(1, 8)), r"`shifted_labels` must be a tensor of integers"),
        (_loss(shifted_labels=IDS), r"3 labels are no entries .*, the first is 5; labels are 0 to 4, or -100"),
        (_loss(num_items_in_batch=math.nan), r"num_items_in_batch must be at least 0"),
        (_loss(num_items_in_batch=torch.ones(2)), r"`num_items_in_batch` must be one number"),
        (lambda _: plan.Job(4096, mode=None), r"mode=None is unknown; choose train"),  # type: ignore[arg-type]
        (lambda _: plan.Job(4096, tiled_loss="no"), r"tiled_loss must be True or False, got 'no'"),  # type: ignore[arg-type]
        (lambda _: plan.read_model(None), r"model None is no name and no path"),  # type: ignore[arg-type]
        (lambda _: plan.read_hardware(3), r"hardware 3 is no name and no path"),  # type: ignore[arg-type]
        (lambda _: plan.Link(1e9, 1e-6), r"the latency of a link must be seconds by collective"),  # type: ignore[arg-type]
        (lambda _: plan.search("x", plan.Job(64), 1, H100), r"model is 'x'; make one with longspan.plan.read_model"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_a_wrong_argument_is_refused(call: Callable[[Any], Any], said: str, sp: longspan.SequenceSharding) -> None:
    with pytest.raises(LongspanError, match=said):
        call(sp)


def test_on_several_ranks() -> None:
    with fake_ranks(4):
        sp = longspan.SequenceSharding(longspan.init_mesh(ring=2, ulysses=2, device_type="cpu"))
        for call, said in (
            (lambda: sp.shard(torch.zeros(1, 0, 3)), r"a sequence needs at least 1 token"),
            (lambda: sp.gather(torch.zeros(1, 0, 3)), r"no sequence gives 4 ranks 0 entries each"),
            (lambda: exchange.reshard(torch.zeros(1, 0, 4), sp.group, 1, 2), r"has nothing to exchange over 4 ranks"),
            (lambda: exchange.heads_to_seq(torch.zeros(1, 8, 2, 0), sp.ulysses_group), r"has nothing to exchange"),
        ):
            with pytest.raises(LongspanError, match=said):
                call()
        assert exchange.heads_to_seq(torch.zeros(1, 8, 1, 4), sp.ulysses_group, heads=1).shape == (1, 4, 1, 4)


def test_numbers_of_numpy_are_numbers(sp: longspan.SequenceSharding) -> None:
    assert sp.positions(np.int64(3)).tolist() == [0, 1, 2]
    out = longspan.attention(Q, K, K, sp, length=np.int64(8), scale=np.float32(0.5), causal=True)  # type: ignore[arg-type]
    assert out.shape == Q.shape
