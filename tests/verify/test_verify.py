"""`longspan verify` passes correct runs, finds planted faults, and names them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from longspan.cli import main
from longspan.core.errors import LongspanError
from longspan.mixers import state_passing
from longspan.ranks.facts import settings
from longspan.verify import VerifyConfig, run, worker
from longspan.verify.inputs import load_model_config, make_batch, model_origin
from longspan.verify.judge import COARSE, Criterion, ErrorSums, judge
from longspan.verify.report import Equality, Report, diagnosis, print_json, print_table
from tests.choose import each_value
from tests.command import ForkedLauncher
from tests.flags import make, replace
from tests.pool import RankError, RankPool
from tests.tolerance import roughly

pytestmark = pytest.mark.versions

SMALL = {
    "vocab_size": 67,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}
GQA = {"num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SMALL, **GQA},
    "qwen3": {"model_type": "qwen3", **SMALL, **GQA, "head_dim": 16, "tie_word_embeddings": True},
    "gemma2": {"model_type": "gemma2", **SMALL, **GQA, "head_dim": 16, "sliding_window": 32, "pad_token_id": None},
    "mixtral": {"model_type": "mixtral", **SMALL, **GQA, "num_local_experts": 4},
    "gpt_neox": {"model_type": "gpt_neox", **SMALL, "attention_dropout": 0.1, "hidden_dropout": 0.1},
    "nemotron_h": {
        **{"model_type": "nemotron_h", **SMALL, **GQA, "hybrid_override_pattern": "M*-", "head_dim": 16},
        **{"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 16},
    },
    # Gradients that are zero because their terms cancel: of a bias of keys, and of queries that see one key.
    "bert": {"model_type": "bert", **SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "one_key": {"model_type": "mistral", **SMALL, **GQA, "sliding_window": 1},
}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A config file of every small model."""
    folder = tmp_path_factory.mktemp("configs")
    paths = {name: folder / f"{name}.json" for name in MODELS}
    for name, path in paths.items():
        path.write_text(json.dumps(MODELS[name]))
    return paths


def _config(path: Path, ranks: int, **changes: Any) -> VerifyConfig:
    return replace(make(VerifyConfig, model=str(path), context=60, ulysses=ranks), **changes)


def _table(report: Report, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    print_table(report)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    return text


def _failing(report: Report) -> set[str]:
    """Return the lines of the table that fail."""
    lines = {line for line, checks in report.groups().items() if not all(check.passed for check in checks)}
    return lines | {f"{equal.name} on all ranks" for equal in report.equalities if not equal.passed}


# --- correct runs pass


@pytest.mark.parametrize(("dtype", "fsdp", "ulysses"), [("fp32", True, 2), ("bf16", True, 4), ("fp32", False, 4)])
def test_llama_passes(
    models: dict[str, Path], get_pool: Callable[[int], RankPool], ulysses: int, fsdp: bool, dtype: str
) -> None:
    config = _config(models["llama"], ulysses, fsdp=fsdp, dtype=dtype)
    assert config.tokens % ulysses
    reports = get_pool(ulysses).run(worker, config)
    assert all(report == reports[0] for report in reports)
    report = reports[0]
    assert report.passed and report.exit_code == 0, _failing(report)
    names = {check.name for check in report.checks}
    shapes = dict(model_origin(config, load_model_config(config)).on_meta().named_parameters())
    assert names == {"loss", "logits", "logits, worst token", *shapes}
    assert all(len(check.sharded) == ulysses for check in report.checks)
    # Two runs that round differently are compared, not one with itself.
    assert any(check.sharded != check.unsharded and max(check.sharded) > 0 for check in report.checks)
    assert [equal.name for equal in report.equalities] == ["loss"] + ["gradients"] * (not fsdp)


@pytest.mark.parametrize(("dtype", "name"), each_value(["fp32", "bf16"], ["qwen3", "gpt_neox", "nemotron_h"]))
def test_other_models_pass(models: dict[str, Path], pool4: RankPool, name: str, dtype: str) -> None:
    report = pool4.run(worker, _config(models[name], 4, dtype=dtype, batch=2))[0]
    assert report.passed, _failing(report)


def test_replicas_with_different_batches_pass(models: dict[str, Path], pool4: RankPool) -> None:
    memory: dict[str, Any] = {"memory": "longest,checkpointing=grouped"}
    report = pool4.run(worker, _config(models["llama"], 2, data=2, batch=2, **memory))[0]
    assert report.passed, _failing(report)
    assert "checkpointing=grouped" in report.setup["memory"]


@pytest.mark.parametrize(("fp64", "name"), each_value([True, False], ["bert", "one_key"]), ids=str)
def test_a_gradient_whose_terms_cancel_is_compared_with_its_layer(
    models: dict[str, Path], pool2: RankPool, name: str, fp64: bool
) -> None:
    report = pool2.run(worker, _config(models[name], 2, fp64=fp64))[0]
    assert report.passed, _failing(report)
    assert max(max(check.sharded) for check in report.checks) < report.detects < 1e-3


@pytest.mark.parametrize(
    ("dtype", "changes"), [("fp32", {"ring": 4}), ("bf16", {"ring": 2, "ulysses": 2, "layout": "contiguous"})], ids=str
)
def test_a_ring_passes(
    models: dict[str, Path], pool4: RankPool, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], dtype: str
) -> None:
    config = replace(_config(models["llama"], 1, dtype=dtype, batch=2), **changes)
    report = pool4.run(worker, config)[0]
    assert report.passed, _failing(report)
    layout = changes.get("layout", "zigzag")
    text = " ".join(_table(report, capsys).split())
    assert f"ring {config.parallel.ring}, ulysses {config.parallel.ulysses}, " in text
    assert f"layout {layout}, " in text


def test_a_model_without_sdpa_and_a_mixture_of_experts_pass(models: dict[str, Path], pool2: RankPool) -> None:
    """The unsharded gemma2 uses eager attention; the fp64 experts do not use grouped matmuls."""
    gemma2 = _config(models["gemma2"], 2, kernel="eager")
    assert model_origin(gemma2, load_model_config(gemma2)).on_meta().config._attn_implementation == "eager"
    for config in (gemma2, _config(models["mixtral"], 2)):
        report = pool2.run(worker, config)[0]
        assert report.passed, _failing(report)


def test_a_model_that_cannot_be_sharded_is_refused_before_the_long_runs(
    models: dict[str, Path], pool2: RankPool
) -> None:
    with pytest.raises(RankError, match="2 of 2 ranks failed") as caught:
        pool2.run(_worker_with, _no_unsharded_run, _config(models["gemma2"], 2, kernel="sdpa"))
    assert all("cannot do softcap" in failure.message for failure in caught.value.failures.values())


def _no_unsharded_run(patch: pytest.MonkeyPatch) -> None:
    from longspan.verify import runs

    patch.delattr(runs, "run_unsharded")


def test_one_process_without_a_group_passes(models: dict[str, Path]) -> None:
    assert worker(_config(models["llama"], 1)).passed


def test_without_fp64_the_reference_is_fp32(
    models: dict[str, Path], pool2: RankPool, capsys: pytest.CaptureFixture[str]
) -> None:
    report = pool2.run(worker, _config(models["llama"], 2, fp64=False))[0]
    text = " ".join(_table(report, capsys).split())
    assert report.passed and "error = |run - fp32| / |fp32|" in text and "3.1e-05 (no wider run" in text
    assert max(max(check.unsharded) for check in report.checks) == 0  # the unsharded run is the reference


def test_real_weights_and_real_text(models: dict[str, Path], pool2: RankPool, tmp_path: Path) -> None:
    random = _config(models["llama"], 2, seed=3)
    model_config = load_model_config(random)
    model_config.vocab_size = 384
    model_origin(random, model_config).build().save_pretrained(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("All happy families are alike; every unhappy family is unhappy in its own way. " * 4)
    config = make(
        VerifyConfig, model=str(tmp_path / "model"), context=60, ulysses=2, text=str(text), tokenizer="bytes", batch=2
    )
    batch = make_batch(config, load_model_config(config))
    assert bytes((batch["input_ids"][0] - 3).tolist()).startswith(b"All happy families")
    report = pool2.run(worker, config)[0]
    assert report.passed, _failing(report)
    assert report.setup["weights"] == "given"


def test_labels_are_masked_unevenly(models: dict[str, Path]) -> None:
    config = _config(models["llama"], 4, context=64, batch=2)
    labels = make_batch(config, load_model_config(config))["labels"]
    assert labels.shape == (2, 63)
    counts = [[int((row[start : start + 16] != -100).sum()) for start in range(0, 63, 16)] for row in labels]
    assert counts[0][0] == 0 and len(set(counts[0])) >= 3 and counts[0] != counts[1]


# --- planted faults are found


def _rank() -> int:
    return dist.get_rank()


def _swap_two_ranks(patch: pytest.MonkeyPatch) -> None:
    original = dist.all_to_all_single

    def swapped(recv: torch.Tensor, send: torch.Tensor, recv_splits: Any, *args: Any, **options: Any) -> Any:
        work = original(recv, send, recv_splits, *args, **options)
        if _rank() == 1:
            first, second, *rest = recv.split(recv_splits or len(recv) // options["group"].size())
            recv.copy_(torch.cat([second, first, *rest]))
        return work

    patch.setattr(dist, "all_to_all_single", swapped)


def _drop_kv_gradient(patch: pytest.MonkeyPatch) -> None:
    from longspan.attn.methods import ulysses

    original = ulysses.scatter_heads

    def dropped(xs: Any, *args: Any) -> Any:
        if _rank() == 1 and torch.is_grad_enabled():
            for x in xs[1:]:  # zero, not absent: without these gradients FSDP would hang
                x.register_hook(torch.zeros_like)
        return original(xs, *args)

    patch.setattr(ulysses, "scatter_heads", dropped)


def _shift_positions(patch: pytest.MonkeyPatch) -> None:
    from longspan.comm.mesh import SequenceSharding

    original = SequenceSharding.positions
    patch.setattr(SequenceSharding, "positions", lambda sp, n: original(sp, n) + (_rank() == 1))


def _shift_labels_after_sharding(patch: pytest.MonkeyPatch) -> None:
    from longspan.hf.forward import shard_batch

    original = shard_batch.cut_batch

    def late(whole: Any, info: Any) -> dict[str, Any]:
        cut = original(whole, info)
        if "labels" in cut:
            cut["labels"][:, -1] = -100
        return cut

    patch.setattr(shard_batch, "cut_batch", late)


def _scale_one_ranks_heads(patch: pytest.MonkeyPatch) -> None:
    from longspan.attn.methods.local import LocalAttention

    original = LocalAttention.__call__
    patch.setattr(LocalAttention, "__call__", lambda *args: original(*args) * (1.01 if _rank() == 1 else 1.0))


def _average_the_loss_per_rank(patch: pytest.MonkeyPatch) -> None:
    from longspan.hf.forward.loss import GlobalLoss

    def loss(losses: Any, logits: Any, labels: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        total = F.cross_entropy(
            logits.compute(logits.hidden.flatten(0, 1)).float(), labels.flatten(), ignore_index=-100, reduction="sum"
        )
        mine = total / (labels != -100).sum().clamp_min(1) / losses.sp.fsdp_size
        every = mine.detach().clone()
        dist.all_reduce(every, group=losses.sp.fsdp_group)
        return mine + (every - mine).detach()

    patch.setattr(GlobalLoss, "of_tokens", loss)


def _do_not_sum_gradients(patch: pytest.MonkeyPatch) -> None:
    from longspan.hf.weights.gradients import GradientAverage

    patch.setattr(GradientAverage, "_average_bucket", lambda self, bucket: None)


def _sum_gradients_over_ranks(patch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import FSDPModule

    original = FSDPModule.set_gradient_divide_factor
    patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda self, _: original(self, 1.0))


def _report_another_loss(patch: pytest.MonkeyPatch) -> None:
    from longspan.hf.forward.loss import GlobalLoss

    original = GlobalLoss.of_tokens
    patch.setattr(GlobalLoss, "of_tokens", lambda *args, **rest: original(*args, **rest) * (1 + 1e-7 * _rank()))


def _nan_in_one_gradient(patch: pytest.MonkeyPatch) -> None:
    from longspan.attn.methods import ulysses

    original = ulysses.gather_heads

    def poisoned(out: torch.Tensor, *args: Any) -> torch.Tensor:
        if _rank() == 1 and out.requires_grad:
            out.register_hook(lambda grad: grad * float("nan"))
        return original(out, *args)

    patch.setattr(ulysses, "gather_heads", poisoned)


def _miss_a_block(patch: pytest.MonkeyPatch) -> None:
    from longspan.attn.kernels.tiled import TiledKernel

    original = TiledKernel.prepare

    def missed(kernel: Any, blocks: Any) -> Any:
        first, *others = original(kernel, blocks)
        return (None if _rank() == 1 else first, *others)

    patch.setattr(TiledKernel, "prepare", missed)


def _do_not_return_gradients(patch: pytest.MonkeyPatch) -> None:
    from longspan.attn.methods.ring import _GradientReducer

    def local_part(self: Any) -> Any:
        self._wait()
        return self.local_grad

    patch.setattr(_GradientReducer, "finish", local_part)


def _pass_states(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        state_before = state_passing.state_before

        def changed(*args: Any) -> torch.Tensor:
            return change(state_before(*args))

        patch.setattr(state_passing, "state_before", changed)

    return plant


def _round_states(patch: pytest.MonkeyPatch) -> None:
    """Combine states in bf16."""
    _pass_states(lambda state: state.bfloat16().to(state.dtype))(patch)


def _drop_state_gradients(patch: pytest.MonkeyPatch) -> None:
    _pass_states(lambda state: state.detach() + 0 * state)(patch)


def _worker_with(plant: Callable[[pytest.MonkeyPatch], None], config: VerifyConfig) -> Report:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        return worker(config)


Find = Callable[..., tuple[Report, set[str]]]
LOGITS = {"logits", "logits, worst token"}
FORWARD = {"loss", *LOGITS}


@pytest.fixture
def find(models: dict[str, Path], get_pool: Callable[[int], RankPool], capsys: pytest.CaptureFixture[str]) -> Find:
    """Verify a Llama with a planted fault; return the report and the failing lines."""

    def verify(plant: Callable[[pytest.MonkeyPatch], None], **changes: Any) -> tuple[Report, set[str]]:
        config = replace(_config(models["llama"], 1), **changes)
        reports = get_pool(config.parallel.ranks).run(_worker_with, plant, config)
        assert all(report.exit_code == 1 for report in reports)
        text = _table(reports[0], capsys)
        failing = _failing(reports[0])
        marked = [line for line in text.splitlines() if " FAIL" in line]
        for line in failing:
            assert any(row.startswith(line) for row in marked), (line, text)
        assert "\nFAIL  " in text and " ".join(diagnosis(reports[0]).split()) in " ".join(text.split())
        return reports[0], failing

    return verify


def _logits_pass_on(report: Report) -> list[bool]:
    (logits,) = (check for check in report.checks if check.name == "logits")
    return [logits.passed_on(rank) for rank in report.ranks]


@pytest.mark.parametrize(
    ("plant", "changes", "wrong", "right", "said"),
    [
        (_swap_two_ranks, {"ulysses": 4}, LOGITS, set(), "The forward pass is wrong"),
        (_miss_a_block, {"ring": 4, "dtype": "bf16"}, LOGITS, set(), "The forward pass is wrong"),
        (_scale_one_ranks_heads, {"ulysses": 4}, {*LOGITS, "attention o"}, set(), "logits differ on"),
        (_shift_labels_after_sharding, {"ulysses": 4}, {"loss", "lm head"}, LOGITS, "labels"),
        (_average_the_loss_per_rank, {"ulysses": 4, "fsdp": False}, {"loss"}, LOGITS, "how the tokens of"),
        (_report_another_loss, {"ulysses": 2}, {"loss on all ranks"}, {*FORWARD, "mlp"}, "how the tokens of"),
    ],
)
def test_finds(find: Find, plant: Any, changes: dict[str, Any], wrong: set[str], right: set[str], said: str) -> None:
    report, failing = find(plant, **changes)
    assert wrong <= failing and not failing & right
    assert said in diagnosis(report)


def test_finds_shifted_positions(find: Find) -> None:
    report, failing = find(_shift_positions, ulysses=4)
    assert failing >= LOGITS
    assert _logits_pass_on(report)[:2] == [True, False]  # causal: tokens before rank 1 do not depend on it
    assert "logits differ on ranks 1, " in diagnosis(report)


@pytest.mark.parametrize(
    ("plant", "changes"), [(_drop_kv_gradient, {"ulysses": 4}), (_do_not_return_gradients, {"ring": 2, "ulysses": 2})]
)
def test_finds_lost_gradients_of_keys_and_values(find: Find, plant: Any, changes: dict[str, Any]) -> None:
    report, failing = find(plant, **changes)
    assert {"attention k", "attention v"} <= failing
    assert not failing & {*FORWARD, "lm head"}
    last = {check.name: check.passed for check in report.checks if check.layer == 1 and check.group.startswith("att")}
    # Earlier layers inherit the error.
    assert last == {f"model.layers.1.self_attn.{x}_proj.weight": x in "qo" for x in "qkvo"}
    assert "look at the backward pass of" in diagnosis(report) and "attention k" in diagnosis(report)


def test_finds_gradients_that_are_not_summed(find: Find) -> None:
    report, failing = find(_do_not_sum_gradients, ulysses=4, fsdp=False)
    assert failing == {*report.groups()} - FORWARD | {"gradients on all ranks"}
    assert "how gradients are summed" in diagnosis(report)
    (equal,) = (equal for equal in report.equalities if equal.name == "gradients")
    assert equal.differing == (1, 2, 3)


def test_finds_gradients_summed_instead_of_averaged(find: Find) -> None:
    report, failing = find(_sum_gradients_over_ranks, ulysses=2, dtype="bf16")
    assert failing == {*report.groups()} - FORWARD
    doubled = pytest.approx(1, rel=roughly(torch.bfloat16))  # to within what bf16 itself is off by
    assert all(check.sharded[0] == doubled for check in report.checks if not check.passed)


@pytest.mark.parametrize("plant", [_round_states, _drop_state_gradients])
def test_finds_faults_of_recurrent_layers(find: Find, models: dict[str, Path], plant: Any) -> None:
    report, failing = find(plant, model=str(models["nemotron_h"]), ulysses=2)
    assert "recurrent" in failing and all(_logits_pass_on(report))


def test_finds_a_nan_in_a_gradient(find: Find, capsys: pytest.CaptureFixture[str]) -> None:
    report, failing = find(_nan_in_one_gradient, ulysses=2)
    assert {"attention q", "attention k", "attention v"} <= failing and not failing & FORWARD
    print_json(report)
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    bad = checks["model.layers.0.self_attn.v_proj.weight"]
    assert not bad["passed"] and None in bad["sharded"]


def _other_weights_on_rank_1(patch: pytest.MonkeyPatch) -> None:
    from longspan.verify import inputs

    original = inputs.model_origin

    def other(config: VerifyConfig, model_config: Any) -> Any:
        return original(replace(config, seed=config.seed + (_rank() == 1)), model_config)

    patch.setattr(inputs, "model_origin", other)


def test_other_weights_on_a_rank_are_refused_on_every_rank(models: dict[str, Path], pool2: RankPool) -> None:
    with pytest.raises(RankError, match="2 of 2 ranks failed") as caught:
        pool2.run(_worker_with, _other_weights_on_rank_1, _config(models["llama"], 2, fsdp=False))
    assert all(
        "the ranks have different weights: model.embed_tokens.weight" in f.message
        for f in caught.value.failures.values()
    )


def _out_of_memory(patch: pytest.MonkeyPatch) -> None:
    from longspan.verify import runs

    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 80 GiB")

    patch.setattr(runs, "run_unsharded", fail)


def test_every_rank_reports_a_reference_out_of_memory_with_a_fix(models: dict[str, Path], pool2: RankPool) -> None:
    for fp64, fix in [(True, "80 GiB; try --no-fp64 or a smaller"), (False, "80 GiB; try a smaller --context")]:
        with pytest.raises(RankError, match="2 of 2 ranks failed") as caught:
            pool2.run(_worker_with, _out_of_memory, _config(models["llama"], 2, fp64=fp64))
        assert all(fix in failure.message for failure in caught.value.failures.values())


# --- refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ""}, "--model is missing"),
        ({"memory": "auto,tiled=true"}, "verify takes auto or options, but not both"),
        ({"ulysses": 0}, "ulysses must be at least 1, got 0"),
        ({"context": 15, "ring": 4}, "--context 15 is too short for 8 ranks: .* --context 16 or more"),
        ({"batch": 0}, "--batch must be at least 1, got 0"),
        ({"context": 7, "ulysses": 4}, "--context 7 is too short for 4 ranks: .* --context 8 or more"),
        ({"context": 257}, "--context 257 is longer than the 256 positions of --model .*give --context 256 or less"),
        ({"tokenizer": "bytes"}, "--tokenizer bytes is for --text; give --text too"),
        ({"model": "mixtral", "dtype": "bf16"}, r"mixtral.json has 4 experts: .* --dtype fp32"),
        ({"text": "pydoc"}, r"tokenizer bytes gives the id \d+, the model's vocabulary has 67 entries"),
        ({"text": "/no/such/text.txt"}, "/no/such/text.txt"),
        ({"model": "/no/such/config.json"}, "--model /no/such/config.json does not exist; give the path"),
        (
            {"model": "some/x.gguf"},
            r"not GGUF(.|\n)*from_gguf.py --file some/x.gguf --out",
        ),
    ],
)
def test_bad_input_is_refused_before_any_rank_starts(
    models: dict[str, Path], changes: dict[str, Any], message: str
) -> None:
    if changes.get("model") in models:
        changes = {**changes, "model": str(models[changes["model"]])}
    with pytest.raises(LongspanError, match=message):
        run(_config(models["llama"], 2, **changes))


class _Bf16Products(TorchFunctionMode):
    """Round the factors of fp32 products to bf16, as ONEDNN_DEFAULT_FPMATH_MODE=BF16 does on CPUs that have it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and args[0].dtype == torch.float32:
            args = [args[0].bfloat16().float(), args[1].bfloat16().float(), *args[2:]]
        return func(*args, **(kwargs or {}))


def _worker_in_bf16(config: VerifyConfig) -> Report:
    with _Bf16Products():
        return worker(config)


def test_products_coarser_than_fp32_fail(
    models: dict[str, Path], pool2: RankPool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both runs round as much as a fault, so that their agreement proves nothing."""
    report = pool2.run(_worker_in_bf16, _config(models["llama"], 2, fsdp=False))[0]
    assert report.product_error > 1e-3 and report.exit_code == 1
    text = " ".join(_table(report, capsys).split())
    assert "Products of the fp32 run" in text and "ONEDNN_DEFAULT_FPMATH_MODE" in text
    assert dataclasses.replace(report, setup={**report.setup, "dtype": "bf16"}, product_error=1.0).coarse is False


def test_an_ill_conditioned_model_passes_and_says_what_it_would_detect(capsys: pytest.CaptureFixture[str]) -> None:
    """Trained weights magnify rounding."""
    report = _made_up(2, 2, ())
    off = ErrorSums(sharded=1.0, unsharded=1.0, reference=1e8, elements=10)  # 1e-4
    names = [check.name for check in report.checks if check.name != "logits, worst token"]
    wide = dataclasses.replace(report, checks=judge({name: [off, off] for name in names}, report.criterion))
    assert wide.passed and wide.exit_code == 0 and wide.detects == pytest.approx(4e-4, rel=0.01)
    assert "A fault above 4.0e-04" in _table(wide, capsys)
    print_json(wide)
    assert json.loads(capsys.readouterr().out)["detects"] == wide.detects
    assert not dataclasses.replace(wide, product_error=2 * COARSE).passed


# --- the report and the command


def _made_up(ranks: int, layers: int, wrong: tuple[int, ...]) -> Report:
    """Return a report of many ranks and layers, in which `wrong` ranks have one wrong gradient."""
    good = ErrorSums(sharded=1.0, unsharded=1.0, reference=1e12, elements=10, worst_row=0)
    bad = dataclasses.replace(good, sharded=1e6)
    names = [f"model.layers.{layer}.self_attn.{x}_proj.weight" for layer in range(layers) for x in "qkvo"]
    sums = {name: [good] * ranks for name in ["loss", "logits", *names]}
    sums[names[-1]] = [bad if rank in wrong else good for rank in range(ranks)]
    setup = {**settings(VerifyConfig()), "dtype": "fp32", "model": "m", "weights": "given", "device": "cpu"}
    setup |= {"tokens": 64 * ranks, "ulysses": ranks, "reference": "fp64"}
    criterion = Criterion.of("fp32", "fp64")
    return Report(setup, criterion, judge(sums, criterion), (Equality.of("loss", [1.0] * ranks),))


def test_many_layers_and_ranks_are_one_short_table(capsys: pytest.CaptureFixture[str]) -> None:
    lines = _table(_made_up(64, 80, (40, 63)), capsys).splitlines()
    assert len(lines) <= 20
    (failing,) = (line for line in lines if " FAIL " in line)
    assert failing.startswith("attention o (80)") and failing.endswith("layer 79 o_proj")
    assert sum(" ok " in line or line.endswith(" ok") for line in lines) == 7


def test_exit_code_follows_the_report(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for wrong, code, verdict in [((), 0, "PASS"), ((1,), 1, "FAIL")]:
        monkeypatch.setattr("longspan.ranks.launch.launch", lambda *_, wrong=wrong, **__: _made_up(2, 2, wrong))
        assert run(_config(models["llama"], 2)) == code
        assert f"\n{verdict}  " in capsys.readouterr().out


def test_equality_names_the_ranks_that_differ(capsys: pytest.CaptureFixture[str]) -> None:
    losses = [2.5, 2.5, 2.25, 2.25, 2.25, 2.5, 2.0]
    unequal = Equality.of("loss", losses)
    report = dataclasses.replace(_made_up(7, 1, ()), equalities=(unequal,))
    assert "differs on ranks 2, 3, 4, 6" in _table(report, capsys)
    print_json(report)
    assert json.loads(capsys.readouterr().out)["equal"][0]["differing"] == [2, 3, 4, 6]
    assert Equality.of("loss", [float("nan")] * 2).differing == (0, 1)


@pytest.mark.launcher
def test_stdout_holds_only_json(models: dict[str, Path], tmp_path: Path) -> None:
    flags = ["--model", str(models["llama"]), "--context", "32", "--ulysses", "2", "--json"]
    process = ForkedLauncher(tmp_path, main, ["verify", *flags])
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    report = json.loads(stdout)
    assert report["schema"] == 4 and report["passed"] is True and report["diagnosis"] is None
    assert report["product_error"] < 2**-20 < report["detects"] < 1e-3
    assert " ".join(report) == "schema passed diagnosis setup criterion detects product_error equal checks"
    loss = report["checks"][0]
    assert set(loss) == {"name", "group", "layer", "passed", "sharded", "unsharded", "limit"}
    assert loss["name"] == "loss" and len(loss["sharded"]) == 2
