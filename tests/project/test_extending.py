"""Run the worked examples of docs/how-to/extend.md as they stand, and check what they define against the code."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from markdown_it import MarkdownIt
from torch import Tensor

import longspan
from longspan.attn.kernels.base import REGISTRY, BackwardInputs
from longspan.attn.kernels.tiled import TileScores, attend_materialized, attend_materialized_backward
from longspan.compat.transformers_api import MIXER_FUNCTIONS
from longspan.core.errors import LongspanError
from longspan.core.layout import LAYOUTS, Contiguous, Layout, RingLayout, choose_layout, register_layout
from longspan.hf.forward.mixer_functions import REPLACEMENTS
from longspan.plan import Job, ParallelConfig, cost, read_hardware, read_model
from tests.generate.generating import check_generated, each_row_alone, generated, prompt
from tests.models import Truth, build, compare, inputs_of, padded, sharding, truth_of
from tests.pool import RankPool

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "extend.md"
STRIPED = "A striped layout"


def run_section(title: str, blocks: int | None = None) -> dict[str, Any]:
    """What the first Python blocks of a section define, run in order; by default all."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    sources = list[str]()
    tokens, inside = MarkdownIt().parse(PAGE.read_text()), False
    for before, token in zip([None, *tokens], tokens, strict=False):
        if before is not None and before.type == "heading_open" and before.tag == "h2":
            inside = token.content == title
        elif inside and token.type == "fence" and token.info == "python":
            sources.append(token.content)
    for source in sources[:blocks]:
        exec(compile(source, f"{PAGE.name}: {title}", "exec"), namespace)
    assert len(namespace) > 2, f"{PAGE} has no section {title!r} with Python in it"
    return namespace


@contextlib.contextmanager
def leaving_no_example() -> Iterator[None]:
    """Restore the registries afterwards."""
    known = MIXER_FUNCTIONS.copy()
    with mock.patch.dict(LAYOUTS), mock.patch.dict(REGISTRY), mock.patch.dict(REPLACEMENTS):
        yield
    MIXER_FUNCTIONS.intersection_update(known)


@pytest.fixture
def registries() -> Iterator[None]:
    with leaving_no_example():
        yield


@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (3, 2), (4, 1)])
def test_the_striped_layout_holds_every_token_once(ring: int, ulysses: int) -> None:
    run_section(STRIPED)
    layout = choose_layout("striped", ring, ulysses)
    for n in (1, 63, 64, 500, 4096):
        held = sorted(span for rank in range(layout.size) for span in layout.spans(n, rank))
        assert [place for span in held for place in range(*span)] == list(range(n))
        padded = {sum(b - a for a, b in layout.padded_spans(n, rank)) for rank in range(layout.size)}
        assert padded == {layout.local_length(n)}


@pytest.mark.usefixtures("registries")
def test_the_planner_uses_the_striped_layout() -> None:
    run_section(STRIPED)
    model, hardware = read_model("llama-3.1-8b"), read_hardware("h100")
    # The last rank's stripes are each one stripe later than the first's: of 16, a sixteenth more than the mean.
    seconds = {
        name: cost(
            model, Job(context=1 << 17, parallel=ParallelConfig(layout=name)).on(ring=8), hardware
        ).compute_seconds
        for name in ("striped", "zigzag", "contiguous")
    }
    assert seconds["zigzag"] <= seconds["striped"] < (1 + 1 / 16) * seconds["zigzag"]
    assert seconds["contiguous"] > 1.3 * seconds["striped"]


class _Wrong(RingLayout):
    name = "wrong"

    def blocks(self, n: int, ring: int) -> Any:
        return [[(0, n // ring)]] * ring


@pytest.mark.usefixtures("registries")
def test_a_wrong_layout_is_refused() -> None:
    register_layout(_Wrong())
    with pytest.raises(LongspanError, match=r"'wrong' must place each of 8 tokens once, in 2 .* blocks of 4.*_Wrong"):
        Layout(2, 1, "wrong").block(8, 0)
    with pytest.raises(LongspanError, match="'wrong' already"):
        register_layout(_Wrong())
    with pytest.raises(LongspanError, match="'contiguous' already"):
        register_layout(Contiguous())


@leaving_no_example()
def _striped_attention(ring: int, n: int) -> float:
    """The error of attention under the striped layout, against the oracle; run by every rank."""
    run_section(STRIPED)
    import torch.distributed as dist

    mesh = longspan.init_mesh(ring=ring, ulysses=dist.get_world_size() // ring)
    sp = longspan.SequenceSharding(mesh, layout="striped")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    mine = [sp.shard(x, dim=1) for x in (q, k, v)]
    out = sp.gather(longspan.attention(*mine, sp, causal=True, length=n), dim=1, length=n)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    return float((out - expected).abs().max())


@pytest.mark.parametrize("ring", [2, 4])
def test_attention_is_exact_under_the_striped_layout(get_pool: Callable[[int], RankPool], ring: int) -> None:
    assert max(get_pool(4).run(_striped_attention, ring, 500)) < 1e-12


def _flash_attention_4() -> Any:
    """Return a module with the two functions of FlashAttention-4 that the page calls, in plain torch.

    Its backward ignores a gradient of the log-sum-exp, as the package's does.
    """

    def forward(
        q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool, return_lse: bool
    ) -> tuple[Tensor, Tensor]:
        assert return_lse
        out, lse = attend_materialized(*_heads_first(q, k, v), _scores(q, k, softmax_scale, causal))
        return out.transpose(1, 2), lse

    def backward(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, *, softmax_scale: float, causal: bool
    ) -> tuple[Tensor, ...]:
        inputs = BackwardInputs(*_heads_first(q, out, dout), lse)
        found = attend_materialized_backward(inputs, *_heads_first(k, v), _scores(q, k, softmax_scale, causal))
        return tuple(_heads_first(*found))

    return SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward)


def _heads_first(*xs: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in xs]


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> TileScores:
    bias = torch.zeros(q.shape[1], k.shape[1])
    if causal:
        bias = bias.masked_fill(torch.ones_like(bias).triu(1).bool(), -torch.inf)
    return TileScores("masked", bias[None, None], scale, None)


@leaving_no_example()
def _with_examples(ring: int) -> dict[str, list[float]]:
    """Differences of output and gradients from longspan's own mask and kernel, by example."""
    streaming = run_section("A mask: sink tokens and a window")["Streaming"](window=9, first=3)
    with mock.patch.dict(sys.modules, {"flash_attn.cute.interface": _flash_attention_4()}):
        mine = run_section("A kernel that serves in rings")["mine"]
    sp = longspan.SequenceSharding(longspan.init_mesh(ring=ring, ulysses=4 // ring))
    draw = torch.Generator().manual_seed(0)
    whole = [torch.randn(2, 40, heads, 8, generator=draw) for heads in (4, 2, 2)]

    def both(ours: dict[str, Any], plain: dict[str, Any]) -> list[float]:
        results = []
        for options in (ours, plain):
            q, k, v = (sp.shard(x).requires_grad_() for x in whole)
            out = longspan.attention(q, k, v, sp, length=40, **options)
            results.append([out, *torch.autograd.grad(out.square().sum(), [q, k, v])])
        return [float((a - b).abs().max()) for a, b in zip(*results, strict=True)]

    documents = (torch.arange(40) // 15).expand(2, -1)
    return {
        "mask": both({"mask": streaming}, {"mask_mod": lambda b, h, i, j: (i - j < 9) | (j < 3)}),
        "kernel": both({"kernel": mine, "documents": documents}, {"documents": documents}),
        "registered": both({"kernel": "flash4", "window": 7}, {"window": 7}),
    }


@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize("ring", [2, 4])
def test_the_mask_and_the_kernels_in_rings(pool4: RankPool, ring: int) -> None:
    for found in pool4.run(_with_examples, ring):
        for name, differences in found.items():
            assert max(differences) < 1e-5, (name, differences)


def _comba_model() -> tuple[dict[str, Any], Any]:
    """Return what the page defines, and a Llama with its layer in the place of an attention."""
    made, model = run_section("A recurrent layer", 1), build("Llama")
    torch.manual_seed(1)
    model.model.layers[0].self_attn = made["CombaLayer"](model.config)
    return made, model


@leaving_no_example()
def _comba(truth: Truth, kind: dict[str, Any]) -> None:
    sp = sharding(ring=2)
    compare(truth, longspan.parallelize(_comba_model()[1], sp), kind, sp)


@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize("side", ["", "right"])
def test_the_recurrent_layer_in_a_model(pool4: RankPool, side: str) -> None:
    whole = padded("Llama", side) if side else inputs_of("Llama")
    pool4.run(_comba, truth_of(_comba_model()[1], whole), whole)


@leaving_no_example()
def _comba_generates(expected: tuple[Tensor, Tensor]) -> None:
    model = longspan.parallelize(_comba_model()[1].eval(), sharding(ring=2))
    check_generated(generated(model, prompt(2, padded=True), prefill_chunk_size=11), expected)


@pytest.mark.usefixtures("registries")
def test_a_model_with_the_recurrent_layer_generates(pool4: RankPool) -> None:
    """The layer knows nothing of caches: plain transformers computes the whole sequence again for every token."""
    model = _comba_model()[1].eval()
    pool4.run(_comba_generates, each_row_alone(model, prompt(2, padded=True), use_cache=False))


@pytest.mark.usefixtures("registries")
def test_a_recurrent_function_is_registered_once() -> None:
    made, model = _comba_model()
    longspan.register_mixer(made["comba"])  # the same again is the same
    for wrong, text in (("causal_conv1d_fn", "there is a mixer 'causal_conv1d_fn' already"), (3, "a function or its")):
        with pytest.raises(LongspanError, match=text):
            longspan.register_mixer(wrong)
    model.model.layers[0].self_attn = type("DeltaNet", (torch.nn.Module,), {})()
    with pytest.raises(LongspanError, match=r"layers.0.self_attn \(DeltaNet\) .* register that with .*register_mixer"):
        longspan.parallelize(model, longspan.SequenceSharding(longspan.init_mesh()))


@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("state", "layer model.layers.0.self_attn passes an initial state"),
        (
            "option",
            r"layer model.layers.0.self_attn passes `feedback` \(\d+, \d+, 4, 1\), a tensor",
        ),
        ("conv", "layer model.layers.0.self_attn calls a Conv1d, which would see the tokens of one rank only"),
    ],
)
def test_what_a_registered_layer_may_not_pass_or_call(monkeypatch: pytest.MonkeyPatch, change: str, text: str) -> None:
    """Each would be silently wrong: a state that is dropped, gates of other tokens, tokens of one rank."""
    made, model = _comba_model()
    layer = model.model.layers[0].self_attn
    monkeypatch.setitem(globals(), "comba", made["comba"])  # layers call it as a global of their file

    class Changed(type(layer)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, **_: Any) -> Any:
            if change == "conv":
                hidden_states = self.conv(hidden_states.mT)[..., :-1].mT
            q, k, v = self.qkv(hidden_states).unflatten(2, (3, self.heads, -1)).unbind(2)
            g, beta = self.gates(hidden_states).sigmoid().chunk(2, -1)
            options: dict[str, Any] = {}
            if change == "state":
                options["initial_state"] = torch.ones(len(v), self.heads, k.shape[3], v.shape[3])
            if change == "option":
                options["feedback"] = beta.unsqueeze(3)
            return self.out(comba(q, k, v, g.log(), beta, **options)[0].flatten(2)), None  # noqa: F821

    layer.__class__ = Changed
    layer.conv = torch.nn.Conv1d(32, 32, 2, padding=1)
    longspan.parallelize(model, longspan.SequenceSharding(longspan.init_mesh()))
    with pytest.raises(LongspanError, match=text):
        model(**inputs_of("Llama"))


def _weighted(
    q: Tensor, k: Tensor, v: Tensor, g: None, beta: Tensor, initial_state: Any = None, weight: Any = 1.0, **_: Any
) -> tuple[Tensor, Tensor]:
    """A recurrent function with a weight of the layer, `[heads, 1]`."""
    start = torch.zeros_like(k[:, 0, ..., None] * v[:, 0, :, None]) if initial_state is None else initial_state
    added = k.unsqueeze(-1) * (weight * beta.unsqueeze(-1) * v).unsqueeze(-2)
    states = start.unsqueeze(1) + added.cumsum(1)
    return (q.unsqueeze(-2) @ states).squeeze(-2), states[:, -1]


def _weighted_model() -> Any:
    model = _comba_model()[1]
    longspan.register_mixer(_weighted)
    layer = model.model.layers[0].self_attn

    class Weighted(type(layer)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, **_: Any) -> Any:
            q, k, v = self.qkv(hidden_states).unflatten(2, (3, self.heads, -1)).unbind(2)
            beta = self.gates(hidden_states).sigmoid()[..., : self.heads]
            return self.out(_weighted(q, k, v, None, beta, weight=self.weight)[0].flatten(2)), None

    layer.__class__ = Weighted
    layer.weight = torch.nn.Parameter(torch.linspace(0.3, 0.9, layer.heads).unsqueeze(1))
    return model


@leaving_no_example()
def _weighted_on_padding(truth: Truth, whole: dict[str, Any]) -> None:
    sp = sharding(ring=2)
    compare(truth, longspan.parallelize(_weighted_model(), sp, fsdp=True), whole, sp)


@pytest.mark.usefixtures("registries")
def test_a_rank_with_padding_alone_has_a_gradient_of_the_functions_weight(pool4: RankPool) -> None:
    """FSDP sums what has a gradient: with fewer weights on one rank, ranks would exchange tensors of two sizes."""
    row = {name: x[2:3] for name, x in padded("Llama", "right").items()}
    whole = {name: F.pad(x, (0, 30), value=-100 if name == "labels" else 0) for name, x in row.items()}
    pool4.run(_weighted_on_padding, truth_of(_weighted_model(), whole), whole, timeout=30)


@leaving_no_example()
def _passed(ring: int) -> dict[str, float]:
    """Differences of output and gradients of the function on ranks from itself, document by document."""
    comba, draw = run_section("A recurrent layer", 1)["comba"], torch.Generator().manual_seed(0)
    sp = longspan.SequenceSharding(longspan.init_mesh(ring=ring, ulysses=4 // ring))
    q, k, v = torch.nn.functional.normalize(torch.randn(3, 1, 40, 2, 8, generator=draw), dim=-1)
    gates = torch.rand(2, 1, 40, 2, generator=draw)
    whole = [x.requires_grad_() for x in (q, k, v, -gates[0], gates[1])]
    g, beta = (sp.shard(x) for x in whole[3:])
    documents = torch.arange(40)[None] // 25
    out, _ = longspan.state_passing(
        comba, *(sp.shard(x) for x in whole[:3]), sp, g=g, beta=beta, length=40, documents=documents, feedback=0.3
    )
    grads = torch.autograd.grad(out.square().sum(), whole)
    for grad in grads:
        torch.distributed.all_reduce(grad)
    parts = [[x[:, a:b] for x in whole] for a, b in ((0, 25), (25, 40))]
    alone = torch.cat([comba(*part, feedback=0.3)[0] for part in parts], 1)
    expected = [alone, *torch.autograd.grad(alone.square().sum(), whole)]
    found = [sp.gather(out, length=40), *grads]
    names = ("out", "q", "k", "v", "g", "beta")
    return {name: float((a - b).abs().max()) for name, a, b in zip(names, found, expected, strict=True)}


@pytest.mark.parametrize("ring", [2, 4])
def test_the_recurrent_function_on_ranks(pool4: RankPool, ring: int) -> None:
    for found in pool4.run(_passed, ring):
        assert max(found.values()) < 1e-4, found


@pytest.mark.usefixtures("registries")
def test_a_recurrent_function_that_does_not_fit() -> None:
    comba, sp = run_section("A recurrent layer")["comba"], longspan.SequenceSharding(longspan.init_mesh())
    q, k, v = torch.randn(3, 1, 40, 2, 8)
    g = beta = torch.zeros(1, 40, 2)
    for options, text in (
        ({"g": g[:, 1:]}, r"`g` must be \[batch, tokens, heads, \.\.\.\], .* got .*\(1, 39, 2\)"),
        ({"k": k[..., :4]}, r"q and k must have one shape, .* got q \(1, 40, 2, 8\), k \(1, 40, 2, 4\)"),
        ({"v": v[:, :, :1]}, r"heads that divide those of v, got .* v \(1, 40, 1, 8\)"),
        ({"initial_state": torch.zeros(1, 2, 8)}, r"`initial_state` must be .*\(1, 2, 8, 8\), got .*\(1, 2, 8\)"),
        ({"chunk_function": None}, "`chunk_function` must be a function of q, k and v, got None"),
        (
            {"chunk_function": lambda q, *_, **__: (q, None)},
            r"<lambda> must return an output .* returned \(1, 40, 2, 8\) and None",
        ),
    ):
        given = {"chunk_function": comba, "q": q, "k": k, "v": v, "g": g, "beta": beta, **options}
        with pytest.raises(LongspanError, match=text):
            longspan.state_passing(sp=sp, **given)
