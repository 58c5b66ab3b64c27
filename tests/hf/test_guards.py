"""Misuse of a parallelized model raises on every rank; supported changes keep working."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import longspan
from longspan.core.errors import LongspanError
from tests.models import batch, build, check_gradients, compare, gradients, on_mesh, sharding, truth_of
from tests.pool import RankPool, on_ranks


def _lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


class _Outer(nn.Module):
    """A user's module around the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> Any:
        return self.model(**batch)


@contextlib.contextmanager
def _as_is_started_rank() -> Iterator[None]:
    """Set the environment from which accelerate learns the number of ranks, and reset its cached state."""
    from accelerate.state import AcceleratorState, PartialState

    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    with mock.patch.dict(os.environ, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks):
        AcceleratorState._reset_state(True)  # another test may have left the state of one process
        PartialState._reset_state()
        try:
            yield
        finally:
            AcceleratorState._reset_state(True)
            PartialState._reset_state()


def _accelerate(model: Any) -> Any:
    from accelerate import Accelerator

    with _as_is_started_rank():
        return Accelerator(cpu=True).prepare(model)(**batch())


def _trainer(model: Any) -> Any:
    import tempfile

    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder, _as_is_started_rank():
        arguments = TrainingArguments(folder, max_steps=1, use_cpu=True, report_to=[])
        rows = [{key: x[0] for key, x in batch(rows=1).items()}] * 8
        Trainer(model, arguments, train_dataset=rows).train()


DDP = "DistributedDataParallel around a parallelized model would average its gradients over the ranks"

MISUSE: dict[str, tuple[Any, str]] = {
    "ddp": (lambda model: DistributedDataParallel(model)(**batch()), DDP),
    "ddp around a module": (lambda model: DistributedDataParallel(_Outer(model))(**batch()), DDP),
    "accelerate": (_accelerate, "with accelerate, prepare the loader, optimizer and scheduler, not the model"),
    "trainer": (_trainer, DDP),
    "peft": (lambda model: _lora(model)(**batch()), "q_proj.lora_A.default.weight was added after parallelize (8 are)"),
    "fsdp1": (lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu"))(**batch()),
              "after parallelize"),
    "fsdp2": (lambda model: fully_shard(model)(**batch()), "use longspan.parallelize(..., fsdp=True), which shards it"),
    "fsdp2 of a layer": (lambda model: (fully_shard(model.model.layers[1]), model(**batch())),
                         "was sharded (fully_shard) after longspan.parallelize(fsdp=False)"),
    "again": (lambda model: longspan.parallelize(model, sharding()), "is parallelized already"),
    "head": (lambda model: (setattr(model, "lm_head", nn.Linear(32, 61)), model(**batch())),
             "parameter lm_head.bias was added after parallelize"),
    "another head": (lambda model: (model.set_output_embeddings(nn.Linear(32, 61, bias=False)), model(**batch())),
                     "module lm_head was replaced after parallelize"),
    "another vocabulary": (lambda model: (model.resize_token_embeddings(64), model(**batch())), "[LS403,"),
    "adapter": (lambda model: (model.register_parameter("late", nn.Parameter(torch.zeros(1))), model(**batch())),
                "parameter late was added after parallelize"),
}  # fmt: skip


def _misused(names: list[str], fsdp: bool) -> list[str]:
    messages, sp = [], sharding(data=2)
    for name in names:
        model = longspan.parallelize(build("Llama"), sp, fsdp=fsdp)
        try:
            MISUSE[name][0](model)
            messages.append(f"{name} was accepted")
        except LongspanError as error:
            messages.append(str(error))
    return messages


def test_misuse_raises(pool2: RankPool) -> None:
    for fsdp in (True, False):
        # torch itself refuses a second FSDP, and DistributedDataParallel around shards or another size of them.
        by_torch = ("fsdp", "ddp", "accelerate", "trainer", "another vocabulary")
        names = [name for name in MISUSE if not (fsdp and name.startswith(by_torch))]
        first, second = pool2.run(_misused, names, fsdp, timeout=120)
        assert first == second
        for name, message in zip(names, first, strict=True):
            assert MISUSE[name][1] in message, (name, message)


def test_a_copy_raises_on_one_process() -> None:
    """Its head would compute with the weights of the model."""
    model = longspan.parallelize(build("Llama"), on_mesh({}))
    with pytest.raises(LongspanError, match=r"copy.deepcopy of a parallelized model would share"):
        copy.deepcopy(_Outer(model))


@on_ranks(2)
def test_autocast_around_an_fsdp_policy_raises() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = longspan.parallelize(build("Llama"), sharding(), mp_policy=policy)
    text = "autocast to torch.bfloat16 around a model whose FSDP computes in torch.bfloat16 \\(mp_policy\\)"
    with pytest.raises(LongspanError, match=text), torch.autocast("cpu", torch.bfloat16):
        model(**batch())
    model(**batch()).loss.backward()


@on_ranks(2)
def test_shards_are_trained_after_inference_mode_and_other_weights() -> None:
    """An evaluation in inference mode makes FSDP's buffers."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    sp, whole, other = sharding(), batch(), build("Llama", seed=5).state_dict()
    model = longspan.parallelize(build("Llama"), sp).train()
    with torch.inference_mode():
        model(**whole)
        with pytest.raises(LongspanError):
            model(**{**whole, "output_attentions": True})
        assert torch.is_inference_mode_enabled()
    compare(truth_of(build("Llama"), whole), model, whole, sp)
    set_model_state_dict(model, other, options=StateDictOptions(full_state_dict=True))
    model.zero_grad()
    compare(truth_of(build("Llama", seed=5), whole), model, whole, sp)


def _early_optimizer(on: list[int], keep: str) -> str:
    """Make an optimizer on ranks `on` before parallelize; `keep` names what is alive when the model is trained."""
    model = build("Llama")
    early = torch.optim.AdamW(model.parameters()) if dist.get_rank() in on else None
    held = list(model.parameters()) if keep == "list" else None
    model = longspan.parallelize(model, sharding())
    if keep != "optimizer":
        early = None
    late = torch.optim.AdamW(model.parameters())
    try:
        with torch.no_grad():
            model(**batch())
        model(**batch()).loss.backward()
    except LongspanError as error:
        return str(error)
    (early or late).step()
    assert held is None or held
    return ""


def _early_optimizer_without_fsdp() -> None:
    """The parameters stay the same objects, so the optimizer trains them."""
    model = build("Llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = longspan.parallelize(model, sharding(), fsdp=False)
    before = model.lm_head.weight.detach().clone()
    model(**batch()).loss.backward()
    optimizer.step()
    assert not torch.equal(model.lm_head.weight, before)


def test_an_optimizer_made_before_parallelize_raises(pool2: RankPool) -> None:
    text = (
        "an optimizer (AdamW) was made before longspan.parallelize: it holds 21 parameters, model.embed_tokens.weight"
    )
    for message in pool2.run(_early_optimizer, [0, 1], "optimizer"):
        assert text in message and "after longspan.parallelize" in message
    for message in pool2.run(_early_optimizer, [1], "optimizer"):
        assert message.startswith("rank 1 refused its batch: an optimizer (AdamW) was made before")
    assert pool2.run(_early_optimizer, [0, 1], "nothing") == ["", ""]
    assert pool2.run(_early_optimizer, [0, 1], "list") == ["", ""]
    pool2.run(_early_optimizer_without_fsdp)


def _compile_on_one_rank(sp: longspan.SequenceSharding) -> None:
    """Compile a model with a window, a softcap and memory options; the other rank, which sends the same, is eager."""
    one = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    memory = longspan.Memory(checkpointing="selective", tiled=True)
    model = longspan.parallelize(build("Gemma2", **one), sp, memory=memory).train()
    run = torch.compile(model, backend="aot_eager") if dist.get_rank() == 0 else model
    out = run(**batch())
    out.loss.backward()
    assert "logits" not in out
    check_gradients(gradients(model), truth_of(build("Gemma2", **one), batch()))


@pytest.mark.parametrize("fsdp", [True, False])
@on_ranks(2, timeout=180)
def test_supported_changes_keep_working(fsdp: bool) -> None:
    """Compiled, checkpointed, moved, and with an optimizer, loader and scheduler prepared by accelerate."""
    from accelerate import Accelerator
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    sp = sharding()
    whole = batch()
    truth = truth_of(build("Llama"), whole)
    model = longspan.parallelize(build("Llama"), sp, fsdp=fsdp)
    model.to("cpu").float().to(torch.float32)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    compare(truth, model.train(), whole, sp)
    model.gradient_checkpointing_disable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = torch.utils.data.DataLoader(range(4), batch_size=4)  # type: ignore[arg-type]
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    with _as_is_started_rank():
        optimizer, loader, scheduler = Accelerator(cpu=True).prepare(optimizer, loader, scheduler)
        optimizer.zero_grad()
        compare(truth, model, whole, sp)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if fsdp:
        _compile_on_one_rank(sp)
        return
    wrapped = longspan.parallelize(build("Llama"), sp, fsdp=False)
    kind = type(wrapped.model.layers[0])
    apply_activation_checkpointing(wrapped, check_fn=lambda module: isinstance(module, kind))
    wrapped(**whole).loss.backward()
    found = {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in gradients(wrapped).items()}
    check_gradients(found, truth)
