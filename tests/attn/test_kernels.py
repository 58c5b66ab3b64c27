"""Which kernel is chosen and why; what each refuses, with the fix."""

from __future__ import annotations

import dataclasses
import logging
import re
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import longspan
from longspan.attn import prepare
from longspan.attn.kernels import base, flash, flex
from longspan.attn.kernels import choice as kernels
from longspan.attn.kernels import tiled as tiles
from longspan.attn.kernels.base import KernelRequest
from longspan.attn.mask import Mask
from longspan.attn.score import Scores
from longspan.core.errors import LongspanError
from longspan.core.parallel import KernelName
from tests.attn.attention import CASES, FEW, HARD, check_all, compare, one_device, sharding
from tests.attn.flexing import differentiable_flex
from tests.choose import confirming
from tests.counting import count_sent
from tests.oracle import Case, make
from tests.pool import RankPool
from tests.tolerance import MARGIN, excess

pytestmark = [pytest.mark.fast, pytest.mark.rounding]


def _qkv(n: int = 8, heads: int = 4) -> list[Tensor]:
    return [torch.zeros(1, n, h, 8) for h in (heads, 2, 2)]


def _plain(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, bias: Any) -> tuple[Tensor, Tensor]:
    return q, q[..., 0].transpose(1, 2)


EXPLAINED = [
    ({}, "sdpa: torch's scaled_dot_product_attention"),
    ({"window": 3}, "tiled: sdpa cannot do window; tiles through torch's flash attention for CPU, in fp32"),
    ({"chunk_size": 3}, "tiled: sdpa cannot do chunk_size; tiles"),
    (
        {"softcap": 3.0},
        "tiled: sdpa cannot do softcap; tiles of 256 x 1024 as matrix products: ",
    ),
    ({"prefix": 3}, "tiled: sdpa cannot do prefix; tiles through torch's flash attention for CPU, in fp32"),
    ({"sinks": torch.zeros(4), "alibi": torch.ones(4)}, "tiled: sdpa cannot do sinks or alibi; tiles through"),
    ({"window": 3, "causal": False}, "tiled: sdpa cannot do window or a window to both sides"),
    (
        {"kernel": "eager"},
        "eager: the formula with its scores materialized; its memory grows with the square of the tokens",
    ),
    ({"kernel": longspan.kernel_with_lse(_plain)}, "_plain: a custom function that returns log-sum-exps"),
]


@pytest.mark.parametrize(("options", "text"), EXPLAINED)
def test_the_choice_is_explained(options: dict[str, Any], text: str) -> None:
    options = dict(options)
    n = options.pop("n", 8)
    assert str(longspan.explain_kernel(*_qkv(n), one_device(), **options)).startswith(text)


def _explained_in_a_ring() -> str:
    sp = sharding(1, dist.get_world_size())
    with count_sent() as log:
        choice = longspan.explain_kernel(*_qkv(4), sp, kernel="sdpa")
    assert not log
    return str(choice)


def test_a_ring_is_explained_and_sends_nothing_for_it(pool2: RankPool) -> None:
    text = (
        "tiled: sdpa returns no log-sum-exp, which a ring of 2 needs to merge blocks; tiles through torch's flash "
        "attention for CPU, in fp32"
    )
    assert pool2.run(_explained_in_a_ring) == [text] * 2


def test_the_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    kernels.log_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger="longspan"):
        for _ in range(3):
            longspan.attention(*_qkv(), one_device(), prefix=2)
    assert [record.message for record in caplog.records] == [
        "attention kernel tiled: sdpa cannot do prefix; tiles through torch's flash attention for CPU, in fp32"
    ]


def _on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, kernel: Any = "auto", capability: tuple[int, int] = (9, 0), **need: Any
) -> kernels.Choice:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(flex.importlib.util, "find_spec", lambda name: object() if name == "triton" else None)
    need = {"mask": Mask(), "scores": Scores(), "grad": True, "dtype": torch.bfloat16, **need}
    return kernels.choose_kernel(kernel, KernelRequest(device=torch.device("cuda"), **need))[1]


LONG, DOCUMENTS = Mask(window=300), Mask(segments=(((0, 3), (3, 8)),))
ON_A_GPU = [
    ({}, "cudnn"),
    ({"mask": Mask(causal=False), "dtype": torch.float16}, "cudnn"),
    ({"ring": 2}, "cudnn"),
    ({"lse": True, "capability": (10, 0)}, "cudnn"),
    ({"scores": Scores(sinks=torch.zeros(4))}, "cudnn"),
    ({"capability": (8, 0)}, "sdpa"),
    ({"capability": (8, 0), "lse": True}, "flash"),
    ({"capability": (12, 0), "ring": 2}, "flash"),
    ({"head_dims": (192, 192)}, "sdpa"),
    ({"head_dims": (192, 128), "ring": 2}, "flash"),
    ({"head_dims": (100, 100), "ring": 2}, "flash"),
    ({"dtype": torch.float32}, "sdpa"),
    ({"mask": Mask(window=3)}, "flash"),
    ({"mask": LONG, "ring": 2}, "flash"),
    ({"mask": DOCUMENTS}, "flash"),
    ({"mask": DOCUMENTS, "ring": 2}, "flash"),
    ({"mask": Mask(prefix=3)}, "flash"),
    ({"scores": Scores(softcap=3.0)}, "flex"),
    ({"scores": Scores(alibi=torch.ones(4)), "ring": 2}, "flex"),
    ({"mask": Mask(mask_mod=lambda b, h, q, kv: q >= kv)}, "flex"),
    ({"scores": Scores(softcap=3.0), "head_dims": (512, 512)}, "tiled"),
    ({"mask": DOCUMENTS, "dtype": torch.float32}, "tiled"),
    ({"mask": LONG, "dtype": torch.float32}, "tiled"),
    ({"mask": LONG, "head_dims": (512, 512)}, "tiled"),
    ({"mask": LONG, "head_dims": (100, 36)}, "flash"),
    ({"mask": LONG, "capability": (7, 5)}, "tiled"),
]


@pytest.mark.parametrize(("need", "name"), ON_A_GPU)
def test_the_choice_on_a_gpu(monkeypatch: pytest.MonkeyPatch, need: dict[str, Any], name: str) -> None:
    assert _on_a_gpu(monkeypatch, **need).name == name


def test_the_choice_on_a_gpu_names_what_was_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(_on_a_gpu(monkeypatch, mask=LONG, dtype=torch.float32)) == (
        "tiled: flash needs fp16 or bf16, these tensors are float32; tiles of 256 x 1024 as matrix products: torch's "
        "flash attention does not take float32 with head_dim 64"
    )
    older = str(_on_a_gpu(monkeypatch, ring=2, capability=(8, 0)))
    assert "sdpa returns no log-sum-exp, which a ring of 2 needs to" in older
    assert str(_on_a_gpu(monkeypatch, ring=2)) == "cudnn: cuDNN's attention, tile by tile"


def test_cudnn_plans_few_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every new length costs it a plan. The choice for a length never changes: a recomputation repeats it."""
    monkeypatch.setattr(kernels, "_cudnn_lengths", set())
    lengths = [(1, 1000 + i) for i in range(20)]
    for lse in (False, True, False):
        chosen = [_on_a_gpu(monkeypatch, tokens=tokens, lse=lse) for tokens in lengths]
        assert [choice.name for choice in chosen] == ["cudnn"] * 8 + ["flash"] * 12
    assert "would let cuDNN build a plan for one more length; torch's flash attention" in str(chosen[-1])
    assert _on_a_gpu(monkeypatch, tokens=(1, 1 << 15)).name == "cudnn"  # long enough for any length
    assert _on_a_gpu(monkeypatch, tokens=(2, 1000)).name == "flash"  # other rows are another plan
    for options, name in (({"dtype": torch.float32}, "sdpa"), ({"capability": (8, 0)}, "sdpa"), ({"ring": 2}, "flash")):
        assert _on_a_gpu(monkeypatch, tokens=(1, 3000), **options).name == name  # type: ignore[arg-type]
    assert _on_a_gpu(monkeypatch, "cudnn", tokens=(1, 3000)).name == "cudnn"


REFUSED_ON_A_GPU = [
    ("flash", {"scores": Scores(softcap=2.0)}, "kernel='flash' cannot do softcap; use kernel='auto'"),
    ("flex", {"head_dims": (64, 320)}, "kernel='flex' needs a head_dim of at most 256, these tensors have 320"),
    ("flash", {"dtype": torch.float64}, "needs fp16 or bf16, these tensors are float64; use kernel='auto'"),
    ("flash", {"head_dims": (320, 8)}, "a head_dim of at most 256, these tensors have 320"),
    ("cudnn", {"mask": LONG}, "kernel='cudnn' cannot do window; use kernel='auto'"),
    (
        "cudnn",
        {"head_dims": (192, 128)},
        "one head_dim, a multiple of 8 of at most 128, these tensors have 192 and 128",
    ),
]


@pytest.mark.parametrize(("kernel", "need", "text"), REFUSED_ON_A_GPU)
def test_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch, kernel: str, need: Any, text: str) -> None:
    with pytest.raises(LongspanError, match=text):
        _on_a_gpu(monkeypatch, kernel, **need)


def test_gpus_kernels_are_refused_on_a_cpu() -> None:
    for kernel in ("flash", "cudnn"):
        with pytest.raises(LongspanError, match="these tensors are on device 'cpu'; use kernel='auto'"):
            longspan.attention(*_qkv(), one_device(), kernel=kernel)


def test_the_command_line_offers_the_kernels_that_exist() -> None:
    assert {*get_args(KernelName)} == {"auto", *kernels.REGISTRY}


@pytest.mark.parametrize("owner", ["mask", "scores"])
def test_every_kernel_refuses_an_option_that_it_does_not_know(monkeypatch: pytest.MonkeyPatch, owner: str) -> None:
    """A field that was added to `Mask` or `Scores`, and to no kernel."""
    kind: Any = {"mask": Mask, "scores": Scores}[owner]
    wider = dataclasses.make_dataclass("Wider", [("novel", Any, None)], bases=(kind,), frozen=True)
    monkeypatch.setitem(kind.__dataclass_fields__, "novel", wider.__dataclass_fields__["novel"])
    monkeypatch.setattr(kind, "novel", None, raising=False)
    monkeypatch.setitem(base.OPTIONS, owner, base._options(kind))
    request = KernelRequest(**{"mask": Mask(), "scores": Scores(), "device": torch.device("cpu"), owner: kind()})
    object.__setattr__(getattr(request, owner), "novel", 3)
    for kernel in ("auto", *kernels.REGISTRY, longspan.kernel_with_lse(_plain)):
        with pytest.raises(LongspanError, match="cannot do novel"):
            kernels.choose_kernel(kernel, request)


FLEX = [name for name in HARD if "cross" not in name]


def _flex_errors(ring: int, names: list[str]) -> dict[str, dict[str, float]]:
    sp = sharding(dist.get_world_size() // ring, ring) if ring > 1 else one_device()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "_flex_attention", differentiable_flex)
        patch.setattr(flex, "_flex_backward", lambda compiled: None)
        patch.setattr(flex, "BLOCK", 4)  # so that these short sequences have full blocks
        patch.setattr(prepare, "choose_kernel", lambda *_, **__: (flex.FLEX, kernels.Choice("flex", "for this test")))
        return {name: compare(HARD[name], sp) for name in names}


def test_flex_gradients_are_exact() -> None:
    check_all(_flex_errors(1, [name for name in FLEX if "prefill" not in name]))


@pytest.mark.slow
@pytest.mark.parametrize("ring", [4, *confirming([2])])
def test_flex_gradients_in_a_ring_are_exact(pool4: RankPool, ring: int) -> None:
    for found in pool4.run(_flex_errors, ring, [name for name in FEW if name in FLEX]):
        check_all(found)


# ---------------------------------------------------------------------------------------------------------------------
# GPU code paths on a CPU.


def _bound(op: Any, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Bind arguments to the names of torch's signature; fail if they do not fit."""
    names = [x.name for x in op.default._schema.arguments if not x.kwarg_only]
    only = {x.name for x in op.default._schema.arguments if x.kwarg_only}
    assert len(args) <= len(names) and set(options) <= only
    return {**dict(zip(names, args, strict=False)), **options}


def _stand_in(*args: Any, **options: Any) -> Any:
    x = _bound(torch.ops.aten._scaled_dot_product_flash_attention, args, options)
    q, k, v = x["query"], x["key"], x["value"]
    assert x["dropout_p"] == 0 and q.shape[3] == k.shape[3] == v.shape[3]
    assert not x["is_causal"] or q.shape[2] == k.shape[2]  # a GPU's kernel aligns the ends otherwise
    return *tiles._flash_cpu(q, k, v, 0.0, x["is_causal"], scale=x["scale"]), None, None, 0, 0, None, None, None


def _stand_in_backward(*args: Any, **options: Any) -> Any:
    x = _bound(torch.ops.aten._scaled_dot_product_flash_attention_backward, args, options)
    q, k, v, out, lse = (x[name] for name in ("query", "key", "value", "out", "logsumexp"))
    assert (x["max_q"], x["max_k"], x["dropout_p"]) == (q.shape[2], k.shape[2], 0)
    assert lse.dtype == torch.float32 and lse.is_contiguous()
    assert out.shape == x["grad_out"].shape == q.shape
    return tiles._flash_cpu_backward(x["grad_out"], q, k, v, out, lse, 0.0, x["is_causal"], scale=x["scale"])


def _as_on_a_gpu(ring: int, names: list[str]) -> dict[str, dict[str, float]]:
    sp = sharding(dist.get_world_size() // ring, ring) if ring > 1 else one_device()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "_flash_cuda", _stand_in)
        patch.setattr(tiles, "_flash_cuda_backward", _stand_in_backward)
        patch.setattr(tiles, "for_device", lambda *xs: list(xs))
        plain = {True: "cuda", False: None}
        patch.setattr(tiles, "_flash_of", lambda q, v_dim, softcap, bias=None: plain[softcap is None and bias is None])
        return {name: compare(CASES[name], sp, "tiled") for name in names}


def test_tiles_as_on_a_gpu_are_exact() -> None:
    """Calls of torch's flash attention for GPUs match its signature; the other tiles are materialized."""
    check_all(_as_on_a_gpu(1, [name for name in CASES if not name.startswith("long")]))


@pytest.mark.slow
@pytest.mark.parametrize("ring", [4, *confirming([2])])
def test_tiles_as_on_a_gpu_are_exact_in_a_ring(pool4: RankPool, ring: int) -> None:
    for found in pool4.run(_as_on_a_gpu, ring, list(FEW)):
        check_all(found)


def _cudnn(*args: Any, **options: Any) -> Any:
    x = _bound(torch.ops.aten._scaled_dot_product_cudnn_attention, args, options)
    q, k, v = x["query"], x["key"], x["value"]
    assert (
        x["attn_bias"] is None and x["compute_log_sumexp"] and x["dropout_p"] == 0 and min(q.shape[2], k.shape[2]) > 1
    )
    assert not x["is_causal"] or q.shape[2] == k.shape[2]
    out, lse = tiles._flash_cpu(q, k, v, 0.0, x["is_causal"], scale=x["scale"])
    return out, lse[..., None], None, None, 0, 0, None, None, None


def _cudnn_backward(*args: Any, **options: Any) -> Any:
    x = _bound(torch.ops.aten._scaled_dot_product_cudnn_attention_backward, args, options)
    q, k, v, lse = x["query"], x["key"], x["value"], x["logsumexp"]
    assert (
        lse.shape == (*q.shape[:3], 1) and lse.is_contiguous() and (x["max_q"], x["max_k"]) == (q.shape[2], k.shape[2])
    )
    saved = (x["out"], lse[..., 0])
    return tiles._flash_cpu_backward(x["grad_out"], q, k, v, *saved, 0.0, x["is_causal"], scale=x["scale"])


CUDNN = ["gqa", "bidirectional", "documents and padding", "sinks", "prefix", "chunked prefill"]


@pytest.mark.parametrize("name", CUDNN)
def test_cudnn_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(flash, "_cudnn", _cudnn)
    monkeypatch.setattr(flash, "_cudnn_backward", _cudnn_backward)
    monkeypatch.setattr(flash, "_unfit_for_cudnn", lambda need: None)
    found = compare(CASES[name], one_device(), "cudnn")
    assert max(found.values()) <= MARGIN, found


# ---------------------------------------------------------------------------------------------------------------------
# Learnt biases.


class _Table(torch.nn.Module):
    """A learnt bias by distance, as in T5."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 7, generator=torch.Generator().manual_seed(0)))

    def forward(self, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return self.weight[h, (q - kv).clamp(-3, 3) + 3]


def _learnt(ring: int, dtype: torch.dtype = torch.float32) -> Tensor:
    sp = sharding(dist.get_world_size() // ring, ring) if ring else one_device()
    x, table = make(Case(n=13)), _Table().to(dtype)
    x = {name: t.to(dtype) for name, t in x.items()}
    q, k, v = (sp.shard(x[name]) for name in "qkv")
    out = longspan.attention(q, k, v, sp, length=13, bias=table, kernel="eager")
    out.backward(sp.shard(x["grad"]))
    grad = table.weight.grad
    assert grad is not None
    if sp.size > 1:
        dist.all_reduce(grad, group=sp.group)
    return grad


def test_eager_learns_a_bias_on_every_mesh(pool4: RankPool) -> None:
    single, exact = _learnt(0), _learnt(0, torch.float64)
    assert single.abs().max() > 0.1
    for ring in (1, 2, 4):
        for grad in pool4.run(_learnt, ring):
            assert excess(grad, single, exact) <= 1


# ---------------------------------------------------------------------------------------------------------------------
# Bad input.


def _not_boolean(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q - kv


def _causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


BAD: list[tuple[dict[str, Any], str]] = [
    ({"window": 0}, "window must be at least 1, got 0"),
    ({"window": -3}, "window must be at least 1, got -3"),
    ({"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
    ({"prefix": -1}, "prefix must be at least 0, got -1"),
    ({"prefix": 9}, "prefix=9 is longer than the 8 keys"),
    ({"prefix": (1, 2)}, "`prefix` has 2 entries, the tensors have a batch of 1"),
    ({"prefix": 2, "causal": False}, "`prefix` needs a causal mask"),
    ({"prefix": 2, "window": 3}, "`prefix` cannot be combined with `window` .* `mask_mod`"),
    ({"mask": Mask(bidirectional=(((0, 2),),) * 2)}, "`bidirectional` has 2 rows, the tensors have a batch of 1"),
    ({"mask": Mask(bidirectional=(((0, 9),),))}, "`bidirectional` reaches to token 9, the sequence has 8"),
    ({"mask": Mask(bidirectional=(((4, 6), (2, 5)),))}, "`bidirectional` spans of a row overlap or are not in order"),
    (
        {"cu_seqlens": torch.tensor([0, 3, 7])},
        "documents of `cu_seqlens` have 7 tokens together, the sequence has 8; .*8",
    ),
    ({"cu_seqlens": torch.tensor([0, 5, 3, 8])}, r"`cu_seqlens` must rise from 0 to the length.* got \[0, 5, 3, 8\]"),
    ({"cu_seqlens": torch.tensor([2, 8])}, "`cu_seqlens` must rise from 0"),
    ({"cu_seqlens": torch.tensor([0, 8]), "documents": torch.zeros(1, 8)}, "both define documents"),
    ({"documents": torch.zeros(1, 9, dtype=torch.int64)}, r"`documents` has the shape \(1, 9\), .* \(1, 8\)"),
    ({"kv_documents": torch.zeros(1, 9), "causal": False}, r"`kv_documents` has the shape \(1, 9\)"),
    (
        {"kv_documents": torch.zeros(1, 8, dtype=torch.int64)},
        r"cross attention\) have no order with the queries; use causal=False",
    ),
    ({"alibi": torch.zeros(3)}, r"`alibi` has the shape \(3,\), one per query head is \(4,\)"),
    ({"softcap": 0.0}, "softcap=0.0 must be above 0"),
    ({"mask_mod": "causal"}, r"mask_mod must be a function \(b, h, q, kv\)"),
    ({"mask_mod": _not_boolean}, "mask_mod must return booleans, it returned torch.int64"),
    ({"mask_mod": _causal, "kernel": "sdpa"}, "kernel='sdpa' cannot do mask_mod; use kernel='auto'"),
    (
        {"softcap": 3.0, "kernel": longspan.kernel_with_lse(_plain)},
        "the kernel _plain cannot do softcap; use kernel='auto'",
    ),
    ({"kernel": lambda q, k, v: q}, "is neither a name .* nor a kernel; make one of a function .*kernel_with_lse"),
    ({"q_start": 1}, "queries at 1 to 8 lie behind the 8 keys"),
    ({"q_start": -1}, "q_start must be at least 0, got -1"),
]


@pytest.mark.parametrize(("options", "text"), BAD)
def test_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(LongspanError) as error:
        longspan.attention(*_qkv(), one_device(), **options)
    assert re.search(text, str(error.value)), error.value


def test_a_learnt_bias_needs_eager() -> None:
    q, k, v = _qkv()
    with pytest.raises(LongspanError, match="computes no gradient of a learnt bias; use kernel='eager'"):
        longspan.attention(q.requires_grad_(), k, v, one_device(), bias=_Table())
    with pytest.raises(LongspanError, match="computes no gradient of a learnt bias"):
        longspan.attention(q, k, v, one_device(), alibi=torch.ones(4, requires_grad=True))


def _refused_in_a_ring(options: dict[str, Any], axes: dict[str, Any]) -> str:
    sp = sharding(axes.pop("ulysses", 1), axes.pop("ring", 1), **axes)
    with count_sent() as log, pytest.raises(LongspanError) as error:
        longspan.attention(*_qkv(4), sp, **options)
    assert not log
    return str(error.value)


RING_BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"kernel": "sdpa", "window": 3}, {"ring": 4}, "kernel='sdpa' cannot do window; use kernel='auto'"),
    ({"length": 30}, {"ring": 4}, "length=30 over 4 ranks gives 8 tokens to each, the tensors have 4"),
]


@pytest.mark.parametrize(("options", "axes", "text"), RING_BAD)
def test_all_ranks_of_a_ring_refuse_with_the_same_text(
    pool4: RankPool, options: dict[str, Any], axes: dict[str, Any], text: str
) -> None:
    messages = pool4.run(_refused_in_a_ring, options, axes)
    assert len(set(messages)) == 1 and text in messages[0]
