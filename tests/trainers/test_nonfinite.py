"""NaN and infinity: the error names the rank and the tensor where they first appear."""

from __future__ import annotations

import pytest
import torch

import longspan
from longspan.core.errors import LongspanError
from longspan.hf.nonfinite import first_nonfinite_weight
from tests.models import batch, build, gradients, rows_of, sharding
from tests.pool import RankPool
from tests.trainers.nan_fault import NAN, NaNFault

FAULTS = {
    "activation": ("activation", "the output of model.layers.1.mlp.up_proj on rank 2 (1 of "),
    "attention": ("input", "what goes into model.layers.1.self_attn.o_proj on rank 2 (1 of "),
    "logits": ("activation", "the output of lm_head on rank 2 ("),
    "gradient": ("gradient", "the gradient of the output of model.layers.1.mlp on rank 2 (1 of "),
    "parameter": ("gradient", "the gradient of parameter model.layers.1.mlp.down_proj.weight on rank 2 (1 of "),
    "weight": ("weight", "weight model.layers.1.self_attn.k_proj.weight on rank 2 (1 of "),
}


def _first_nonfinite(faults: list[str], data: int, ring: int, fsdp: bool, checkpointing: bool) -> list[tuple[str, str]]:
    sp = sharding(data, ring)
    mine = rows_of(batch(), sp.data_rank, data)
    results = []
    for kind in faults:
        model = longspan.parallelize(build("Llama"), sp, fsdp=fsdp)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(**mine).loss.backward()
        before = {name: grad.clone() for name, grad in gradients(model).items()}
        assert longspan.find_nonfinite(model, mine) is None
        fault = NaNFault(kind, model, 2)
        first = longspan.find_nonfinite(model, mine)
        fault.remove()
        assert first is not None
        results.append((first.kind, str(first)))
        assert (first_nonfinite_weight(model, sp) is not None) == (kind == "weight")
        if kind != "weight":  # accumulated gradients are unchanged, and the fault is gone
            assert longspan.find_nonfinite(model, mine, backward=False) is None
            after = gradients(model)
            assert all(torch.equal(after[name], grad) for name, grad in before.items())
            model(**mine).loss.backward()
    return results


@pytest.mark.parametrize(
    ("faults", "data", "ring", "fsdp", "checkpointing"),
    [
        (["activation", "logits", "parameter", "weight"], 2, 1, True, False),
        (["attention", "parameter"], 1, 2, False, False),
        (["gradient"], 2, 2, True, True),
    ],
)
def test_the_first_tensor_is_named(
    pool4: RankPool, faults: list[str], data: int, ring: int, fsdp: bool, checkpointing: bool
) -> None:
    results = pool4.run(_first_nonfinite, faults, data, ring, fsdp, checkpointing, timeout=120)
    assert all(each == results[0] for each in results)
    for (kind, text), fault in zip(results[0], faults, strict=True):
        assert kind == FAULTS[fault][0] and FAULTS[fault][1] in text, text


def test_one_device_and_a_model_that_is_not_parallelized() -> None:
    model = longspan.parallelize(build("Llama"), longspan.SequenceSharding(longspan.init_mesh()))
    assert longspan.find_nonfinite(model, batch()) is None
    model.model.norm.weight.data[4] = NAN
    assert str(longspan.find_nonfinite(model, batch())) == (
        "weight model.norm.weight on rank 0 (1 of 32 values are NaN or infinite)"
    )
    model.model.norm.weight.data[:] = 3e38  # finite, although its sum overflows
    assert first_nonfinite_weight(model, longspan.SequenceSharding(longspan.init_mesh())) is None
    with pytest.raises(LongspanError, match=r"LlamaForCausalLM is not parallelized; call longspan.parallelize"):
        longspan.find_nonfinite(build("Llama"), batch())
