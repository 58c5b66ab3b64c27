"""Wrong arguments of public functions raise, with the value and the fix."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import longspan
from longspan import checkpoint, exchange, plan
from longspan.core.errors import LongspanError
from tests.fakes import fake_world
from tests.models import build

Q, K = torch.zeros(1, 8, 4, 8), torch.zeros(1, 8, 2, 8)
H100 = plan.read_hardware("h100")
IDS = torch.arange(8)[None]
BATCH = {"input_ids": IDS, "labels": IDS}
NUMBERS = ("hidden_size", "num_hidden_layers", "num_key_value_heads", "rope_parameters", "pad_token_id", "model_type")


@pytest.fixture
def sp() -> longspan.SequenceSharding:
    return longspan.SequenceSharding(longspan.init_mesh())


@pytest.fixture(scope="module")
def model() -> Any:
    return longspan.parallelize(build("Llama"), longspan.SequenceSharding(longspan.init_mesh()))


def _sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters())


def _plain(sp: longspan.SequenceSharding, **options: Any) -> Any:
    return longspan.parallelize(build("Llama"), sp, **options)


def _attend(**changes: Any) -> Callable[[Any], Any]:
    return lambda sp: longspan.attention(**{"q": Q, "k": K, "v": K, "sp": sp, **changes})


def _batch(**changes: Any) -> Callable[[Any], Any]:
    return lambda sp: longspan.shard_batch({"input_ids": IDS, **changes}, sp)


def _loss(**changes: Any) -> Callable[[Any], Any]:
    return lambda sp: longspan.causal_lm_loss(
        **{"logits": torch.zeros(1, 8, 5), "shifted_labels": IDS % 5, "sp": sp, **changes}
    )


@pytest.mark.parametrize(
    ("call", "text"),
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
        (_attend(mask_mod=lambda b, h, q, kv: None), r"mask_mod must return a tensor for each pair, it returned None"),
        (_attend(bias=lambda h, q, kv: None), r"bias must return a tensor for each pair, it returned None"),
        (_attend(bias=3), r"bias must be a function .*, got 3 \(int\)"),
        (_attend(kernel=3), r"kernel=3 is neither a name .* nor a kernel"),
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
        (lambda _: longspan.init_mesh(device_type="meta"), r"device_type='meta' is unknown; choose 'cpu' or 'cuda'"),
        (lambda _: exchange.seq_to_heads("x", None), r"`x` must be a tensor"),
        (lambda _: exchange.seq_to_heads(Q, "world"), r"`group` must be a process group or None, got 'world'"),
        (lambda _: exchange.reshard(Q, None, 1, "2"), r"`dim`='2' is no dimension of a tensor"),
        (lambda _: exchange.heads_to_seq(Q, None, heads=0), r"heads must be at least 1, got 0"),
        (lambda _: exchange.ring_shift(Q, None, hops=0.5), r"hops must be an integer"),
        (lambda sp: longspan.shard_batch([IDS], sp), r"`batch` must be a dict of tensors .*, got \[tensor"),
        (lambda sp: longspan.shard_batch({"input_ids": IDS}, sp, shift=None), r"shift must be True or False, got None"),
        (_batch(labels=5), r"`labels` must be a tensor, got int"),
        (_loss(logits=torch.zeros(5)), r"`logits` must be a floating tensor \[batch, tokens, vocabulary\]"),
        (_loss(shifted_labels=torch.zeros(1, 8)), r"`shifted_labels` must be a tensor of integers"),
        (_loss(shifted_labels=IDS), r"`shifted_labels` holds 5, the vocabulary has 5 ids: 0 to 4, or -100"),
        (_loss(num_items_in_batch=math.nan), r"num_items_in_batch must be at least 0"),
        (_loss(num_items_in_batch=torch.ones(2)), r"`num_items_in_batch` must be one number"),
        (lambda _: plan.Job(4096, mode=None), r"mode=None is unknown; choose 'train'"),  # type: ignore[arg-type]
        (lambda _: plan.Job(4096, documents="no"), r"documents must be True or False, got 'no'"),  # type: ignore[arg-type]
        (lambda _: plan.read_model(None), r"model None is neither a name nor a path"),  # type: ignore[arg-type]
        (lambda _: plan.read_hardware(3), r"hardware 3 is neither a name nor a path"),  # type: ignore[arg-type]
        (lambda _: plan.Link(1e9, 1e-6), r"latency of a link must be seconds by collective"),  # type: ignore[arg-type]
        (lambda _: plan.search("x", plan.Job(64), 1, H100), r"model is 'x'; make one with longspan.plan.read_model"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_wrong_arguments_raise(call: Callable[[Any], Any], text: str, sp: longspan.SequenceSharding) -> None:
    with pytest.raises(LongspanError, match=text):
        call(sp)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda m, sp, to: longspan.parallelize(m, sp.mesh), r"`sp` must be a longspan.Seq.*, got <.*MeshGroups"),
        (lambda m, sp, to: longspan.parallelize(m, m), r"`sp` must be .*, got an instance of LlamaForCausalLM; make"),
        (lambda m, sp, to: _plain(sp, fsdp="no"), r"fsdp must be True or False, got 'no'"),
        (lambda m, sp, to: _plain(sp, logits=1), r"logits must be True or False, got 1"),
        (lambda m, sp, to: longspan.from_pretrained(to, sp, torch_dtype="bf16"), r"did you mean 'dtype'"),
        (lambda m, sp, to: longspan.from_pretrained(to, sp, dtype="b16"), r"`dtype` must be a floating .*got 'b16'"),
        (lambda m, sp, to: longspan.ShardedCache.load(None, m), r"`folder` must be a path .*got None"),
        (lambda m, sp, to: longspan.kernel_with_lse(3), r"function must be a function \(q, k, v, .*\), got 3"),
        (lambda m, sp, to: longspan.Mask(mask_mod=lambda i: i), r"be a function \(b, h, q, kv\), this one takes \(i\)"),
        (lambda m, sp, to: m(input_ids=IDS.float()), r"`input_ids` must be a tensor of integers"),
        (lambda m, sp, to: m.generate("text"), r"`inputs` must be a tensor, got 'text'"),
        (lambda m, sp, to: checkpoint.save(to, 1, m, None, {}), r"`optimizer` must be a torch.optim.*None"),
        (lambda m, sp, to: checkpoint.save(to, "1", m, _sgd(m), {}), r"step must be an integer"),
        (lambda m, sp, to: checkpoint.save(to, -1, m, _sgd(m), {}), r"step must be at least 0"),
        (lambda m, sp, to: checkpoint.load(to / "none", m, _sgd(m)), r"none holds no checkpoint; give a checkpoint"),
        (lambda m, sp, to: checkpoint.load(3, m, _sgd(m)), r"`checkpoint` must be a path .*got 3"),
        (lambda m, sp, to: checkpoint.load_weights(to, None), r"`model` must be a model .*got None"),
        (lambda m, sp, to: checkpoint.export(to, m, dtype="b16"), r"`dtype` must be a floating .*got 'b16'"),
    ],
)  # fmt: skip
def test_wrong_calls_with_a_model_raise(
    call: Callable[..., Any], text: str, model: Any, sp: longspan.SequenceSharding, tmp_path: Path
) -> None:
    with pytest.raises(LongspanError, match=text):
        call(model, sp, tmp_path)


def test_paths_as_text_and_dtypes_as_names(sp: longspan.SequenceSharding, tmp_path: Path) -> None:
    """Save, load and export with paths as text; an export has the model's config and dtype by default."""
    model = longspan.parallelize(build("Llama"), sp)
    run, folder = str(tmp_path / "run"), str(tmp_path / "hf")
    saved = checkpoint.save(run, 3, model, _sgd(model), {})
    other = longspan.parallelize(build("Llama", seed=1), sp)
    for path in (str(saved), run):  # a run's folder: its newest
        checkpoint.load(path, other, _sgd(other))
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    found, _ = checkpoint.newest_undamaged(run)
    assert found is not None and found.step == 3
    checkpoint.export(folder, model)
    assert transformers.AutoModelForCausalLM.from_pretrained(folder).dtype == torch.float32
    checkpoint.export(folder, model, dtype="bf16")
    own = build("Llama").config.to_dict()
    loaded = longspan.from_pretrained(folder, sp, dtype="bfloat16")
    assert loaded.dtype == torch.bfloat16
    assert all(loaded.config.to_dict()[key] == value for key, value in own.items() if key in NUMBERS)


def test_empty_sequences_raise_on_several_ranks() -> None:
    with fake_world(0, 4):
        sp = longspan.SequenceSharding(longspan.init_mesh(ring=2, ulysses=2, device_type="cpu"))
        for call, text in (
            (lambda: sp.shard(torch.zeros(1, 0, 3)), r"a sequence needs at least 1 token"),
            (lambda: sp.gather(torch.zeros(1, 0, 3)), r"no sequence gives 4 ranks 0 entries each"),
            (lambda: exchange.reshard(torch.zeros(1, 0, 4), sp.group, 1, 2), r"has nothing to send to 4 ranks"),
            (lambda: exchange.heads_to_seq(torch.zeros(1, 8, 2, 0), sp.ulysses_group), r"has nothing to send"),
        ):
            with pytest.raises(LongspanError, match=text):
                call()
        assert exchange.heads_to_seq(torch.zeros(1, 8, 1, 4), sp.ulysses_group, heads=1).shape == (1, 4, 1, 4)


def test_numpy_numbers_are_accepted(sp: longspan.SequenceSharding) -> None:
    assert sp.positions(np.int64(3)).tolist() == [0, 1, 2]
    out = longspan.attention(Q, K, K, sp, length=np.int64(8), scale=np.float32(0.5), causal=True)  # type: ignore[arg-type]
    assert out.shape == Q.shape
