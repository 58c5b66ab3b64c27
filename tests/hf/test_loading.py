"""Models that are sharded while they are loaded: the weights of one process, and no rank ever holds all of them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import longspan
from longspan.comm.weights import local_part
from longspan.core.errors import LongspanError
from tests.host_memory import peak_of
from tests.models import Truth, batch, build, check_gradients, check_loss, gradients, rows_of, sharding, truth_of
from tests.pool import RankError, RankPool, on_ranks

pytestmark = pytest.mark.versions

AUTO = {"Bert": "AutoModelForMaskedLM"}
#: Tied weights, merged experts (converted as they are read), stacked experts, a renamed key, a tied bias.
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
    """A folder of each kind, with changed weights and biases; the Llama's in several files."""
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


def _loads(folder: Path, family: str, dtype: Any, truth: Truth | None, data: int = 1, ring: int = 1) -> None:
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
    if truth is not None:
        out = model.train()(**rows_of(batch(), sp.data_rank, sp.data_size))
        out.loss.backward()
        check_loss(float(out.loss.detach()), truth)
        check_gradients(gradients(model), truth)


@pytest.mark.parametrize("family", KINDS)
def test_weights_equal_those_of_one_process(
    folders: dict[str, Path], pool2: RankPool, pool4: RankPool, family: str
) -> None:
    """Llama also with two replicas of two ranks."""
    truth = truth_of(_plain(folders[family], family, torch.float32).train(), batch())
    pool2.run(_loads, folders[family], family, torch.float32, truth)
    if family == "Llama":
        pool4.run(_loads, folders[family], family, torch.float32, truth, 2)


@pytest.mark.parametrize(("family", "dtype"), [("Qwen3", "auto"), ("GptOss", torch.bfloat16)])
def test_other_dtypes(folders: dict[str, Path], pool2: RankPool, family: str, dtype: Any) -> None:
    pool2.run(_loads, folders[family], family, dtype, None)


def _adapter(base: Path, folder: Path, **how: Any) -> Path:
    """Save a PEFT adapter with nonzero weights, as PEFT does."""
    import transformers
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    options = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "lora_dropout": 0.1}
    get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options | how)).save_pretrained(folder)  # type: ignore[arg-type]
    return folder


def _loads_adapter(base: Path, folder: Path, dtype: torch.dtype) -> None:
    from peft import PeftModel

    sp = sharding()
    model = longspan.from_pretrained(folder, sp, dtype=dtype)
    whole = _plain(base, "Llama", dtype)
    plain: Any = PeftModel.from_pretrained(whole, str(folder), autocast_adapter_dtype=False).eval()
    mine, theirs = dict(model.named_parameters()), dict(plain.get_base_model().named_parameters())
    assert mine.keys() == theirs.keys() and any("lora_A" in name for name in mine)
    for name, x in theirs.items():
        assert mine[name].dtype == x.dtype and torch.equal(_whole(mine[name]), x), name
    ids = batch()["input_ids"]
    with torch.no_grad():
        found = longspan.token_logprobs(model, {"input_ids": ids}, gather=True)[:, :-1]
        expected = plain(input_ids=ids).logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    if dtype == torch.float32:  # in bf16 comparing the weights is enough
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("family", "how", "dtype"),
    [
        ("Llama", {}, torch.bfloat16),
        ("Llama", {"modules_to_save": ["lm_head"], "use_dora": True}, torch.float32),
        ("Qwen3Moe", {}, torch.float32),  # the first rank makes it, and sends the rows
    ],
    ids=str,
)
def test_the_folder_of_an_adapter_is_loaded_as_peft_loads_it(
    folders: dict[str, Path], pool2: RankPool, tmp_path: Path, family: str, how: Any, dtype: Any
) -> None:
    pool2.run(_loads_adapter, folders[family], _adapter(folders[family], tmp_path, **how), dtype)


def test_an_adapter_that_does_not_fit_its_base_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder, sp = _adapter(folders["Llama"], tmp_path / "a"), longspan.SequenceSharding(longspan.init_mesh())
    settings = json.loads((folder / "adapter_config.json").read_text())
    for base, said in (
        (str(folders["GPT2"]), "cannot be put on its base model .*q_proj"),
        (str(tmp_path / "gone"), "adapter_config.json: base_model_name_or_path .*gone does not exist"),
        (None, "names no base model; set base_model_name_or_path"),
    ):
        (folder / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": base}))
        with pytest.raises(LongspanError, match=said):
            longspan.from_pretrained(folder, sp)


# ---------------------------------------------------------------------------------------------------------------------
# Random weights, adapters, and weights that the caller loads later.


def _origin(seed: int = 5, **changes: Any) -> Any:
    import transformers

    from longspan.hf.weights.origin import Origin

    return Origin(transformers.AutoModelForCausalLM, build("Qwen3", **changes).config, torch.float32, seed=seed)


@on_ranks(4)
def test_random_weights_are_those_of_the_first_rank() -> None:
    from longspan.hf.loading import load_sharded

    # 61 rows of the table, head dim 7: rows do not divide over the ranks. Each rank has another seed.
    origin = _origin(seed=5 + dist.get_rank(), tie_word_embeddings=True)
    model = load_sharded(origin, sharding())
    plain = _origin(tie_word_embeddings=True).build()
    assert {*dict(plain.named_parameters())} == {*dict(model.named_parameters())} and model.training
    for name, x in [*plain.named_parameters(), *plain.named_buffers()]:
        assert torch.equal(_whole(model.get_parameter(name) if x.requires_grad else model.get_buffer(name)), x), name


@on_ranks(2)
def test_weights_that_are_loaded_later_are_not_made() -> None:
    from longspan.hf.loading import load_sharded

    model = load_sharded(_origin(tie_word_embeddings=True), sharding(), later=True)
    plain = _origin(tie_word_embeddings=True).build()
    assert all(torch.equal(x, model.get_buffer(name)) for name, x in plain.named_buffers())
    shapes = [{name: p.shape for name, p in each.named_parameters()} for each in (model, plain)]
    assert shapes[0] == shapes[1]
    assert not any(p.is_meta for p in model.parameters())


def _adapted(folder: Path, how: dict[str, Any]) -> None:
    from peft import LoraConfig, get_peft_model

    def wrap(model: Any) -> Any:
        torch.manual_seed(7)
        options: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **how}
        return get_peft_model(model, LoraConfig(**options))

    sp = sharding()
    model = longspan.from_pretrained(str(folder), sp, dtype=torch.float32, prepare=wrap)
    truth = truth_of(wrap(_plain(folder, "Llama", torch.float32)), batch())
    out = model(**batch())
    out.loss.backward()
    check_loss(float(out.loss.detach()), truth)
    check_gradients(gradients(model), truth)
    assert all("lora" in name for name in gradients(model))


def test_prepare_adds_adapters_before_the_weights_are_read(folders: dict[str, Path], pool2: RankPool) -> None:
    pool2.run(_adapted, folders["Llama"], {})
    for how in ({"use_dora": True}, {"modules_to_save": ["lm_head"]}):
        with pytest.raises(RankError, match="not loaded yet.*load the whole model") as caught:
            pool2.run(_adapted, folders["Llama"], how)
        assert len(caught.value.failures) == 2


# ---------------------------------------------------------------------------------------------------------------------
# Memory of a rank's host.

BIG = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "head_dim": 64}


def _held(folder: Path, name: str | None) -> tuple[int, int, int, int]:
    """Return bytes: the peak, this rank's shards, the largest parameter, all parameters."""
    from longspan.hf.loading import load_sharded

    sp, origin, found = sharding(), _origin(**BIG), list[Any]()

    def load() -> None:
        if name is None:
            found.append(load_sharded(origin, sp))
        else:
            found.append(longspan.from_pretrained(name, sp, dtype=torch.float32))

    mapped = (folder / "model" / "model.safetensors").stat().st_size
    most = peak_of(load, folder / f"trace-{sp.rank}.json", mapped)
    parameters = list(found[0].parameters())
    sizes = [p.numel() * p.element_size() for p in parameters]
    return most, sum(local_part(p).nbytes for p in parameters), max(sizes), sum(sizes)


def test_no_host_holds_more_than_its_shards_and_one_parameter(pool4: RankPool, tmp_path: Path) -> None:
    build("Qwen3", **BIG).bfloat16().save_pretrained(tmp_path / "model")
    for name in (str(tmp_path / "model"), None):
        for rank, (most, shards, largest, all_) in enumerate(pool4.run(_held, tmp_path, name)):
            limit = shards + largest + (64 << 10)
            assert limit < 0.7 * all_
            if name is None and rank == 0:
                assert most >= all_  # it makes the model: the measurement sees it
            else:
                assert shards <= most <= limit


# ---------------------------------------------------------------------------------------------------------------------
# Errors, on every rank.


def _change(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _refusal(folders: list[Path]) -> str:
    with pytest.raises(LongspanError) as caught:
        longspan.from_pretrained(str(folders[dist.get_rank()]), sharding())
    return str(caught.value)


def _add_to(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors[name][-1].add_(1)


DAMAGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "other weights": (
        lambda folder: _change(folder, _add_to("model.layers.1.mlp.up_proj.weight")),
        r"different weights: model\.layers\.1\.mlp\.up_proj\.weight on rank 1",
    ),
    "a key less": (
        lambda folder: _change(folder, lambda tensors: tensors.pop("model.norm.weight")),
        r"the model's weights.*they are read",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no safetensors files"),
    "cut off": (
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-9]),
        r"rank 1 .* cannot be read: it has .* bytes, its header says .*fetch it again",
    ),
    "no header": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 99),
        "model.safetensors cannot be read: its header would have",
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), "no model config can be read"),
}


@pytest.mark.parametrize("fault", DAMAGED)
def test_a_rank_with_another_folder_is_refused(
    folders: dict[str, Path], pool2: RankPool, tmp_path: Path, fault: str
) -> None:
    change, said = DAMAGED[fault]
    other = tmp_path / "other"
    shutil.copytree(folders["Qwen3"], other)
    change(other)
    messages = pool2.run(_refusal, [folders["Qwen3"], other])
    assert len(set(messages)) == 1 and re.search(said, messages[0]), messages


def test_missing_weights_and_files_are_named(folders: dict[str, Path], pool2: RankPool, tmp_path: Path) -> None:
    shutil.copytree(folders["Qwen3"], tmp_path / "less")
    _change(tmp_path / "less", lambda tensors: tensors.pop("model.norm.weight"))
    messages = pool2.run(_refusal, [tmp_path / "less"] * 2)
    assert all(re.search(r"lacks 1 weights .* would be random: model\.norm\.weight", each) for each in messages)
    shutil.copytree(folders["Llama"], tmp_path / "part")
    index = json.loads((tmp_path / "part" / "model.safetensors.index.json").read_text())
    gone = index["weight_map"]["lm_head.weight"]
    (tmp_path / "part" / gone).unlink()
    messages = pool2.run(_refusal, [tmp_path / "part"] * 2)
    assert all(f"{gone}." in each and "fetch it again" in each for each in messages)
