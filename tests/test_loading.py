"""A model that is sharded while it is loaded: the same weights as one process loads, and never all of them on a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import longspan
from tests.models import batch, build, check_gradients, check_loss, gradients, rows_of, sharding, truth_of
from tests.pool import RankPool

AUTO = {"Bert": "AutoModelForMaskedLM"}
#: Tied, merged experts (converted on the way), experts as they are, a key that is renamed, a bias tied beside the head.
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"tie_word_embeddings": True},
    "Qwen3Moe": {},
    "GptOss": {},
    "GPTNeoX": {},
    "GPT2": {},
    "Bert": {},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each kind, with weights and biases that are not as they are made; the Llama's in several files."""
    found = {}
    for family, changes in KINDS.items():
        found[family] = tmp_path_factory.mktemp(family)
        model = build(family, **changes)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=0.02)
        model.save_pretrained(found[family], max_shard_size="20KB" if family == "Llama" else "1GB")
    assert len(list(found["Llama"].glob("*.safetensors"))) > 2
    return found


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def _plain(folder: Path, family: str, dtype: Any) -> Any:
    import transformers

    auto = getattr(transformers, AUTO.get(family, "AutoModelForCausalLM"))
    return auto.from_pretrained(folder, dtype=dtype)


def _loads(folder: Path, family: str, dtype: Any, data: int = 1, ring: int = 1) -> None:
    sp = sharding(data, ring)
    model = longspan.from_pretrained(str(folder), sp, dtype=dtype)
    plain = _plain(folder, family, dtype)
    assert not model.training
    if plain.can_generate():
        assert model.generation_config.to_dict() == plain.generation_config.to_dict()
    for kind in ("named_parameters", "named_buffers"):
        mine, theirs = (dict(getattr(each, kind)(remove_duplicate=False)) for each in (model, plain))
        assert mine.keys() == theirs.keys()
        for name, x in theirs.items():
            assert mine[name].dtype == x.dtype and torch.equal(_whole(mine[name]), x), name
    assert len(list(model.parameters())) == len(list(plain.parameters()))  # what is tied stays tied
    if dtype == torch.float32:
        whole = batch()
        truth = truth_of(plain.train(), whole)
        out = model.train()(**rows_of(whole, sp.data_rank, sp.data_size))
        out.loss.backward()
        check_loss(float(out.loss.detach()), truth)
        check_gradients(gradients(model), truth)


@pytest.mark.parametrize("family", KINDS)
def test_weights_are_those_that_one_process_loads(folders: dict[str, Path], pool2: RankPool, family: str) -> None:
    pool2.run(_loads, folders[family], family, torch.float32)


@pytest.mark.parametrize(("data", "ring"), [(2, 1), (1, 4), (1, 2)])
def test_on_every_mesh(folders: dict[str, Path], pool4: RankPool, data: int, ring: int) -> None:
    pool4.run(_loads, folders["Llama"], "Llama", torch.float32, data, ring)


@pytest.mark.parametrize("family", ["Qwen3", "GptOss", "Qwen3Moe"])
def test_in_other_dtypes(folders: dict[str, Path], pool4: RankPool, family: str) -> None:
    for dtype in (torch.bfloat16, "auto"):
        pool4.run(_loads, folders[family], family, dtype)
