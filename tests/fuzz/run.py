"""Run one case with plain transformers in one process and on the ranks, and compare the results."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import itertools
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import longspan
from longspan import checkpoint
from longspan.core.errors import LongspanError
from longspan.hf.model.support import check_model, is_masked_lm
from longspan.hf.model.vision import encoders_of
from longspan.verify.runs import fp64_casts
from tests.fuzz.cases import IGNORED, Batch, Case, batch_of
from tests.fuzz.families import build, default_model
from tests.hf import pictures
from tests.models import Run, Truth, gradient_excess, gradients, truth_by, widened
from tests.oracle import plain_divergence
from tests.pool import RankError, RankHang, RankPool
from tests.tolerance import excess, excess_of_rows
from tests.trainers import fitting

LIMIT_S = 90.0
Setup = Callable[[], contextlib.AbstractContextManager[Any]]
Pools = Callable[[int], RankPool]
TIE = 1e-4
"""Rounding may swap two logits that are no further apart than this, relative to the largest."""


@dataclass(frozen=True)
class Outcome:
    """equal, refused, failed, or plain (plain transformers itself cannot run it); `text` explains."""

    kind: str
    text: str = ""


def judge(cases: list[Case], pools: Pools, setup: Setup = contextlib.nullcontext) -> list[Outcome]:
    """Return the outcomes of cases on one mesh. The sharded runs are inside `setup`, by which a test plants faults.

    All cases share one task of the ranks, since making process groups takes longer than running a case. If one raises
    or hangs, each is run by itself.
    """
    limit_s = LIMIT_S + 10 * len(cases)
    try:
        truths = pools(1).run(plain_runs, cases, timeout=limit_s)[0]
        runs = [(case, truth) for case, truth in zip(cases, truths, strict=True) if not isinstance(truth, Outcome)]
        by_rank = pools(cases[0].ranks).run(sharded_runs, runs, setup, timeout=limit_s) if runs else []
    except (RankError, RankHang) as error:
        if len(cases) > 1:
            return [outcome for case in cases for outcome in judge([case], pools, setup)]
        ranks = f" on ranks {sorted(error.failures)}" if isinstance(error, RankError) else ""
        return [Outcome("failed", f"{_last(error, 25)}{ranks}")]
    found = iter([_of_all_ranks(list(of_case)) for of_case in zip(*by_rank, strict=True)])
    return [truth if isinstance(truth, Outcome) else next(found) for truth in truths]


def _of_all_ranks(found: list[Outcome]) -> Outcome:
    kinds, texts = {outcome.kind for outcome in found}, sorted({outcome.text for outcome in found})
    if kinds == {"refused"} and len(texts) > 1:
        return Outcome("failed", f"refused with another text on each rank: {texts}")
    if len(kinds) > 1 and "refused" in kinds:
        return Outcome("failed", f"refused by some ranks alone: {[(o.kind, o.text) for o in found]}")
    return next((o for o in found if o.kind == "failed"), found[0])


def refusal(family: str, pools: Pools) -> Outcome:
    """Return why a family's small default is refused with any options, or cannot be made; if it is equal, what it reads
    besides text.
    """
    try:
        found: Outcome = pools(1).run(_refusal, family, timeout=LIMIT_S)[0]
    except (RankError, RankHang) as error:
        return Outcome("plain", _last(error))
    return found


def _refusal(family: str) -> Outcome:
    _quiet()
    try:
        try:
            model = build(family, {}, 0)
        except Exception as error:  # no small model: the default one, without weights, may be refused as well
            with torch.device("meta"), contextlib.suppress(RuntimeError, ValueError, TypeError, KeyError):
                check_model(default_model(family), torch.device("cpu"), 1, "auto")
            raise error
        check_model(model, torch.device("cpu"), 1, "auto")
    except LongspanError as error:
        return Outcome("refused", str(error))
    return Outcome("equal", ", ".join(encoder.modality for encoder in encoders_of(model)))


def _last(error: RankError | RankHang, lines: int = 3) -> str:
    if isinstance(error, RankHang):
        return f"hung: {error}"
    failure = next(iter(error.failures.values()))
    return "\n".join([*failure.traceback.strip().splitlines()[-lines:], failure.message[:300]])


def _model(case: Case) -> Any:
    model = build(case.family, case.config, case.seed)
    if case.double:
        model = model.double()
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # the grouped product of a mixture of experts has no fp64
    if case.lora:
        import peft

        torch.manual_seed(case.seed)
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.0)
        )
    model.train()
    for module in model.modules():  # statistics of a batch are refused in training
        if isinstance(module, torch.nn.BatchNorm1d):
            module.eval()
    return model


def _batches(case: Case, model: Any, replica: tuple[int, int] = (0, 1)) -> list[Batch]:
    if model.config._attn_implementation == "eager" and case.labels == "edge":
        case = dataclasses.replace(case, labels="all")  # eager and sdpa differ for padding, which sees no token
    vocabulary = model.config.get_text_config().vocab_size
    batches = [batch_of(case, i, vocabulary, replica) for i in range(case.steps * case.micro)]
    if "token_type_ids" not in inspect.signature(model.forward).parameters:
        for batch in batches:
            batch.plain.pop("token_type_ids", None)
            batch.whole.pop("token_type_ids", None)
    if case.embeds:
        for batch in batches:
            with torch.no_grad():
                embeds = model.get_input_embeddings()(batch.plain["input_ids"])
            for inputs in (batch.plain, batch.whole):
                del inputs["input_ids"]
                inputs["inputs_embeds"] = embeds
    return batches


# --- plain transformers


def plain_runs(cases: list[Case]) -> list[Any]:
    """Return what one process computes for each case; an `Outcome` for a case that it cannot run."""
    _quiet()
    truths = list[Any]()
    for case in cases:
        try:
            truths.append(_plain_run(case))
        except Exception as error:  # of any kind: plain transformers raised it
            truths.append(Outcome("plain", f"{type(error).__name__}: {error}"[-200:]))
    return truths


def _plain_run(case: Case) -> Any:
    if case.job == "trainer":
        with tempfile.TemporaryDirectory() as folder:
            out, args = Path(folder), _arguments(case)
            log = fitting.plain(out, _trained(case), **args)
            # Of some families transformers' resumed run differs from the one without interruption: either is right.
            resumes = "save_steps" in case.generation
            again = [fitting.plain(out, _trained(case), resume=str(out / "checkpoint-2"), **args)] if resumes else []
            return [log, *again]
    if case.job == "generate":
        # Of Mamba-1 transformers' own prefill in chunks starts each chunk from a zero state.
        whole = dataclasses.replace(case, generation={**case.generation, "prefill_chunk_size": None})
        expected = _generated(whole, _model(case))
        apart = dataclasses.replace(whole, generation={**whole.generation, "use_cache": False})
        if not torch.equal(expected[0], _generated(apart, _model(case))[0]):
            raise ValueError("plain transformers generates other tokens with its cache than without")
        if (beams := case.generation.get("num_beams", 1)) > 1:  # sounds are repeated in another order than rows
            first = _generated(dataclasses.replace(case, generation={"max_new_tokens": 1}), _model(case))[1]
            if not torch.allclose(expected[1][:, :1], first.repeat_interleave(beams, 0), atol=1e-3):
                raise ValueError("plain transformers computes other logits for the beams of a row than for the row")
        return expected
    model = _model(dataclasses.replace(case, double=False))  # rounding in fp32 is the limit for fp64 too
    batches = _batches(case, model)
    if not _replicas_agree(case, model, batches[0]):
        raise ValueError("plain transformers computes other logits for some rows of a batch than for all")
    apart = bool(batches[0].documents) and _leaks(model, batches[0])
    if apart and getattr(model.config.get_text_config(), "output_router_logits", False):
        raise ValueError("transformers balances the routers of documents together only if they attend to each other")

    def run(model: Any) -> Run:
        return _trained_plainly(case, model, batches, apart)

    for wide in (widened, copy.deepcopy):  # some layers, and fp32 softmax over masked scores, cannot run in fp64
        try:
            truth = truth_by(copy.deepcopy(model), run, wide)
        except RuntimeError:
            if wide is widened:
                continue
            raise
        numbers = [truth.exact.loss, truth.exact.logits[batches[-1].real], *truth.exact.gradients.values()]
        if all(bool(torch.as_tensor(x).isfinite().all()) for x in numbers):
            return truth
    raise ValueError("plain transformers gives numbers that are not finite")


def _replicas_agree(case: Case, model: Any, batch: Batch) -> bool:
    """Return whether plain transformers computes for a replica's rows what it does for all, in rows with pictures."""
    replicas = case.mesh.get("data", 1)
    if replicas == 1 or case.family.startswith(("causal", "masked")):
        return True
    with torch.no_grad():
        everything = model(**batch.plain, use_cache=False).logits.chunk(replicas)
        for number, expected in enumerate(everything):
            mine = _batches(case, model, (number, replicas))[0]
            logits = model(**mine.whole, use_cache=False).logits
            if (logits - expected)[mine.real].abs().max() > 1e-3 * expected.abs().max():
                return False
    return True


def _leaks(model: Any, batch: Batch) -> bool:
    """Return whether plain transformers computes other logits for packed documents than for each by itself."""
    inputs = {key: x for key, x in batch.plain.items() if key != "labels"}
    with torch.no_grad():
        packed, apart = model(**inputs, use_cache=False).logits, _each_document(model, batch).logits
    return bool((packed - apart).abs().max() > 1e-4 * apart.abs().max())


def _trained_plainly(case: Case, model: Any, batches: list[Batch], apart: bool) -> Run:
    forward: Any = _each_document if apart else lambda model, batch: model(**batch.plain, use_cache=False)
    if case.teacher:
        forward = functools.partial(_distilled, forward, _teacher(case), case)
    return _trained_by(case, model, batches, forward, lambda m: contextlib.nullcontext())


def _teacher(case: Case) -> Any:
    config = {name: x for name, x in case.config.items() if name == "vocab_size"}
    return _model(dataclasses.replace(case, seed=case.seed + 1, lora=False, config=config)).eval()


def _distilled(forward: Callable[[Any, Batch], Any], teacher: Any, case: Case, model: Any, batch: Batch) -> Any:
    """Return what a student's forward does, with its mean divergence from a teacher as the loss."""
    out = forward(model, batch)
    if out.loss is None:
        return out
    other = teacher if out.logits.dtype == torch.float32 else widened(teacher)
    with torch.no_grad(), fp64_casts(other) if other is not teacher else contextlib.nullcontext():
        logits = [out.logits, forward(other, batch).logits]
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    labels = batch.plain["labels"]
    labels = labels if is_masked_lm(inner) else F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    options = {"beta": 0.0, "temperature": 1.0, "top_k": None} | case.teacher
    return _Out(plain_divergence(*logits, **options)[labels != IGNORED].mean(), out.logits)


def _each_document(model: Any, batch: Batch) -> Any:
    """Run each document through the model by itself; the loss is the mean over all."""
    rows = []
    for row, borders in enumerate(batch.documents):
        parts = []
        for start, stop in itertools.pairwise(borders):
            part = {k: x[row : row + 1, start:stop] for k, x in batch.plain.items() if k != "labels"}
            parts.append(model(**part, use_cache=False).logits)
        rows.append(torch.cat(parts, 1))
    logits = torch.cat(rows)
    labels = batch.plain.get("labels")
    if labels is None:
        return _Out(None, logits)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    labels = labels if is_masked_lm(inner) else F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    return _Out(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED), logits)


@dataclass
class _Out:
    loss: Any
    logits: Tensor


def _trained_by(
    case: Case,
    model: Any,
    batches: list[Batch],
    forward: Callable[[Any, Batch], Any],
    no_sync: Callable[[Any], Any],
    between: Callable[[Any, Any], tuple[Any, Any]] | None = None,
) -> Run:
    """Train, then compute logits; return first loss, first step's gradients, and last loss as `aux_loss`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first, found, loss = 0.0, dict[str, Tensor](), 0.0
    for step in range(case.steps):
        for micro in range(case.micro):
            with no_sync(model) if micro < case.micro - 1 else contextlib.nullcontext():
                out = forward(model, batches[step * case.micro + micro])
                (out.loss / case.micro).backward()
            loss = float(out.loss.detach())
            first = loss if step == micro == 0 else first
        if step == 0:
            found = gradients(model)
        if case.steps > 1:
            optimizer.step()
        optimizer.zero_grad()
        if step == 0 and between is not None and case.resume:
            model, optimizer = between(model, optimizer)
    last = batches[-1]
    model.eval()
    with torch.no_grad():
        unlabelled = [{k: x for k, x in inputs.items() if k != "labels"} for inputs in (last.whole, last.plain)]
        logits = forward(model, dataclasses.replace(last, whole=unlabelled[0], plain=unlabelled[1])).logits
    model.train()
    return Run(first, logits.detach(), found, loss)


# --- the ranks


def sharded_runs(runs: list[tuple[Case, Any]], setup: Setup) -> list[Outcome]:
    """Run each case on every rank, and compare it with what plain transformers computed."""
    _quiet()
    mesh, found = None, list[Outcome]()
    for case, truth in runs:
        try:
            with setup():
                mesh = mesh or longspan.init_mesh(**case.mesh)
                found.append(_sharded_run(case, mesh, truth))
        except LongspanError as error:
            found.append(Outcome("refused", str(error)))
    return found


def _sharded_run(case: Case, mesh: Any, truth: Any) -> Outcome:
    if case.job == "trainer":
        return _sharded_trainer(case, truth)
    sp = longspan.SequenceSharding(mesh, **case.sharding)
    if case.job == "generate":
        return _sharded_generation(case, sp, truth)
    return _sharded_steps(case, sp, truth)


def _options(case: Case) -> dict[str, Any]:
    memory = case.options.get("memory", "fastest")
    return {**case.options, "memory": longspan.Memory(**memory) if isinstance(memory, dict) else memory}


def _sharded_steps(case: Case, sp: longspan.SequenceSharding, truth: Truth) -> Outcome:
    model = _model(case)
    batches = _batches(case, model, (sp.data_rank, sp.data_size))
    teacher = longspan.parallelize(_teacher(case), sp, **_options(case)) if case.teacher else None
    model = longspan.parallelize(model, sp, **_options(case))

    def forward(model: Any, batch: Batch) -> Any:
        if teacher is not None and torch.is_grad_enabled():
            return _Out(longspan.distillation_loss(model, teacher, batch.whole, **case.teacher), torch.empty(0))
        out = model(**batch.whole)
        if out.logits is not None and not torch.is_grad_enabled():
            out = _Out(out.loss, sp.gather(out.logits, dim=1, length=batch.real.shape[1]))
        return out

    found = _trained_by(case, model, batches, forward, longspan.no_sync, lambda m, o: _resumed(case, sp, m, o))
    single, exact = truth.single, truth.exact
    worst = {
        "loss": excess(found.loss, single.loss, exact.loss),
        "last loss": excess(found.aux_loss or 0.0, single.aux_loss or 0.0, exact.aux_loss or 0.0),
        "equal losses": 0.0 if len(set(_of_all(found.loss))) == 1 else torch.inf,
    }
    real = batches[-1].real
    a, b = (run.logits.chunk(sp.data_size)[sp.data_rank][real] for run in (single, exact))
    worst["logits"] = excess_of_rows(found.logits[real], a, b)
    missing = exact.gradients.keys() ^ found.gradients.keys()
    # A parameter without influence on the loss has no gradient, or zeros.
    extra = {n for n in missing if n in found.gradients and not bool(found.gradients[n].any())}
    if missing - extra:
        return Outcome("failed", f"gradients of one side only: {sorted(missing - extra)}")
    worst |= gradient_excess({n: x for n, x in found.gradients.items() if n not in extra}, truth)
    name = max(worst, key=lambda n: worst[n])
    return Outcome("equal" if worst[name] <= 1 else "failed", f"{name} {worst[name]:.3g} of the limit")


def _of_all(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _resumed(case: Case, sp: Any, model: Any, optimizer: Any) -> tuple[Any, Any]:
    """Return a new model, loaded from a checkpoint of this one."""
    with tempfile.TemporaryDirectory() as mine:
        folder = Path(_of_all(mine)[0])
        checkpoint.save(folder, 1, model, optimizer, {})
        other = longspan.parallelize(_model(dataclasses.replace(case, seed=case.seed + 1)), sp, **_options(case))
        optimizer = torch.optim.SGD(other.parameters(), lr=0.05)
        saved, _ = checkpoint.newest_undamaged(folder)
        assert saved is not None
        checkpoint.load(saved, other, optimizer)
        dist.barrier()
    return other, optimizer


# ---- Generation.


def _generated(case: Case, model: Any, replica: tuple[int, int] = (0, 1)) -> tuple[Tensor, Tensor]:
    from transformers import GenerationConfig

    batch = batch_of(case, 0, model.config.get_text_config().vocab_size, replica)
    inputs = {k: x for k, x in batch.whole.items() if k != "labels"} | {"attention_mask": batch.real.long()}
    fixed: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    if case.family.startswith(("vision", "types")):  # a generated placeholder would need a picture
        fixed["suppress_tokens"] = list(range(pictures.IMAGE, min(64, model.config.get_text_config().vocab_size)))
    config = GenerationConfig(**case.generation, **fixed, return_dict_in_generate=True, output_logits=True)
    out = model.eval().generate(**inputs, generation_config=config)
    return out.sequences, torch.stack(out.logits, 1)


def _sharded_generation(case: Case, sp: longspan.SequenceSharding, expected: tuple[Tensor, Tensor]) -> Outcome:
    model = longspan.parallelize(_model(case).eval(), sp, **_options(case))
    ids, logits = _generated(case, model, (sp.data_rank, sp.data_size))
    rows = slice(sp.data_rank * len(ids), (sp.data_rank + 1) * len(ids))
    beams = case.generation.get("num_beams", 1)
    true_ids = expected[0][rows][:, : ids.shape[1]]  # a replica's rows may all end before those of the other
    true_logits = expected[1][rows.start * beams : rows.stop * beams, : logits.shape[1]]
    size = float(true_logits.abs().max())
    if torch.equal(ids, true_ids):
        apart = float((logits - true_logits).abs().max()) / size
        return Outcome("equal" if apart <= TIE else "failed", f"logits are {apart:.2g} apart")
    if beams > 1:
        return Outcome("failed", f"other ids: {ids.tolist()} for {true_ids.tolist()}")
    for row, (mine, theirs) in enumerate(zip(ids, true_ids, strict=True)):
        differs = (mine != theirs).nonzero()
        if len(differs) == 0:
            continue
        step = int(differs[0]) - (mine.shape[0] - true_logits.shape[1])
        scores = true_logits[row, step]
        if abs(float(scores[mine[differs[0]]] - scores[theirs[differs[0]]])) > TIE * size:
            return Outcome(
                "failed", f"row {row}: other ids from new token {step}: {mine.tolist()} for {theirs.tolist()}"
            )
    return Outcome("equal", "ids differ by a tie")


# ---- Trainer.


def _trained(case: Case) -> Callable[[], Any]:
    return lambda: _model(case)


def _arguments(case: Case) -> dict[str, Any]:
    save = {"save_strategy": "steps"} if "save_steps" in case.generation else {}
    # Adam divides by the size of a gradient: where a gradient is rounding alone, it makes that as large as a step.
    fixed = {"optim": "sgd", "learning_rate": 0.05}
    return {
        **fixed,
        "max_steps": 4,
        "warmup_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        **save,
        **case.generation,
    }


def _sharded_trainer(case: Case, expected: list[list[dict[str, Any]]]) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(_of_all(folder)[0])
        args = {**_arguments(case), "family": _trained(case), **_options(case)}
        log = fitting.sharded(case.mesh, out, args)
        if "save_steps" in case.generation:
            log = fitting.sharded(case.mesh, out, {**args, "resume_from_checkpoint": str(out / "checkpoint-2")})
        dist.barrier()
    apart = [_of_log(log, other) for other in expected]
    return Outcome("equal") if None in apart else Outcome("failed", str(apart[0]))


def _of_log(log: list[dict[str, Any]], expected: list[dict[str, Any]]) -> str | None:
    """Return the first number of a Trainer's log that is not the expected one, or None."""
    for mine, theirs in zip(*([r for r in x if "train_runtime" not in r] for x in (log, expected)), strict=True):
        for key in ("step", "loss", "grad_norm", "eval_loss"):
            if (key in mine) != (key in theirs) or abs(mine.get(key, 0) - theirs.get(key, 0)) > 2e-4 * abs(
                theirs.get(key, 0)
            ):
                return f"step {theirs['step']}: {key} {mine.get(key)} for {theirs.get(key)}"
    return None


def _quiet() -> None:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
