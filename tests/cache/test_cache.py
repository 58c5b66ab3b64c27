"""The sharded KV cache: bytes and collectives against the planner, quantized dtypes, saving and loading."""

from __future__ import annotations

import errno
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

import longspan
from longspan.attn.score import Scores
from longspan.cache import layer_cache, quantize
from longspan.cache.attend import merge
from longspan.cache.layer_cache import LayerCache
from longspan.cache.quantize import QUANTIZED_FORMATS
from longspan.hf.cache import files
from longspan.plan import Job
from longspan.plan.from_model import shape_from_config
from longspan.plan.job import CostContext
from longspan.plan.layers import messages
from tests.counting import count_sent
from tests.generate.generating import CHANGES, NEW, PROMPT, check_generated, generated, parallelized, plain, prompt
from tests.models import build, sharding
from tests.pool import RankError, RankPool

pytestmark = pytest.mark.versions

MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "MQA": {"num_key_value_heads": 1},
    "uneven": {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3},
    "Mistral": {},
    "Gemma3Text": {},
    "DeepseekV3": CHANGES["DeepseekV3"],
}
RINGS = {"Llama": (2,), "MQA": (1,), "uneven": (1, 2), "Mistral": (4,), "Gemma3Text": (2,), "DeepseekV3": (1, 2)}


def _build(name: str) -> Any:
    return build({"MQA": "Llama", "uneven": "Llama"}.get(name, name), **MODELS[name]).eval()


def _as_planned() -> None:
    """Bytes on each rank after a prompt in chunks and generated tokens; collectives of a chunk and of a token."""
    for name in MODELS:
        for ring in RINGS[name]:
            sp = sharding(ring=ring)
            source = _build(name)
            model = longspan.parallelize(source, sp, fsdp=False)
            shape = shape_from_config(source.config.to_dict(), name)
            job = Job(context=PROMPT, batch=2, mode="decode", dtype="fp32").on(ring=ring, ulysses=sp.ulysses_size)
            cache = longspan.ShardedCache(model)
            chunk = 32
            with torch.no_grad(), count_sent() as sent:
                ids = prompt(2, PROMPT)["input_ids"]
                model(input_ids=ids[:, :chunk], past_key_values=cache, logits_to_keep=1)
            assert _of_layers(sent) == _planned(shape, job, chunk, sp), (name, ring)
            with torch.no_grad():
                model(input_ids=ids[:, chunk:], past_key_values=cache, logits_to_keep=1)
            tokens = 66 if name == "Llama" and ring == 2 else 3
            for _ in range(tokens):
                with torch.no_grad(), count_sent() as sent:
                    model(input_ids=ids[:, :1], past_key_values=cache)
            assert _of_layers(sent) == _planned(shape, job, 1, sp), (name, ring)
            c = CostContext(shape, job)
            planned = [layer.mixing.cache_by_rank(c, tokens, chunk) for layer in shape.layers]
            assert [cache.layer_caches[i].nbytes for i in range(len(planned))] == [held[sp.rank] for held in planned]
            assert cache.nbytes == sum(held[sp.rank] for held in planned)
            at_prompt = [layer.mixing.cache_by_rank(c) for layer in shape.layers]
            assert [max(held) for held in at_prompt] == [layer.mixing.cache_bytes(c) for layer in shape.layers]


def _of_layers(sent: list[Any]) -> Counter[tuple[str, int]]:
    """Without the comparison of batches: one gather of four numbers from each rank."""
    compared = Counter({("all_gather", 4 * 8 * (dist.get_world_size() - 1)): 1})
    return Counter((one.op, one.bytes) for one in sent) - compared


def _planned(shape: Any, job: Job, tokens: int, sp: Any) -> Counter[tuple[str, int]]:
    planned: Counter[tuple[str, int]] = Counter()
    for layer in shape.layers:
        each = (
            messages.decode(layer.mixing, CostContext(shape, job))
            if tokens == 1
            else messages.prompt_chunk(layer.mixing, CostContext(shape, job), tokens, sp.ulysses_rank)
        )
        for one in each:
            planned[one.op, one.bytes] += one.calls
    return planned


@pytest.mark.filterwarnings("ignore:`ulysses")
def test_bytes_and_collectives_are_the_planners(pool4: RankPool) -> None:
    pool4.run(_as_planned)


def test_merged_parts_equal_one_softmax_with_sinks() -> None:
    """Keys in three parts of 5, 0 and 8; sinks count once."""
    g = torch.Generator().manual_seed(0)
    x, v = torch.randn(2, 3, 4, 13, generator=g).double(), torch.randn(2, 3, 13, 6, generator=g).double()
    x[0, 0, 0] = -torch.inf  # a query that sees no key
    parts = []
    for a, b in ((0, 5), (5, 5), (5, 13)):
        lse = x[..., a:b].logsumexp(-1, keepdim=True)
        out = (x[..., a:b] - torch.where(lse.isneginf(), 0.0, lse)).exp() @ v[:, :, a:b]
        parts.append(torch.cat([out, lse], -1))
    for sinks in (None, torch.tensor([0.5, -2.0, 3.0], dtype=torch.float64)):
        scores = Scores(scale=None, sinks=sinks)
        more = torch.full((2, 3, 4, 1), -torch.inf).double()
        more = more if sinks is None else sinks[:, None, None].expand_as(more)
        p = torch.cat([x, more], -1).softmax(-1)[..., :-1].nan_to_num(0.0)
        torch.testing.assert_close(merge(torch.stack(parts), scores, v.dtype), p @ v, rtol=1e-12, atol=1e-12)


def test_a_full_window_does_not_move_at_every_token() -> None:
    """Its layer has room for the window alone."""
    store = LayerCache(room=64)
    with mock.patch.object(store, "_reallocate", wraps=store._reallocate) as moves:
        for i in range(400):
            x = torch.full((1, 1, 1, 2), float(i))
            store.append(x, x)
            store.drop_before(max(0, i - 62), min(i + 1, 63))
    assert moves.call_count <= 400 // 8 and store.allocated == 72 * 2 * 2 * 4
    assert store.read(torch.float32)[0][0, 0, :, 0].tolist() == list(range(337, 400))


def test_a_layer_grows_by_an_eighth_and_frees_tokens_behind_a_window() -> None:
    def tokens(first: int, n: int) -> tuple[Tensor, Tensor]:
        at = torch.arange(first, first + n, dtype=torch.float32)[None, None, :, None]
        return at.expand(1, 2, n, 4), -at.expand(1, 2, n, 3)

    store, sizes = LayerCache(), set()
    for i in range(1000):
        store.append(*tokens(i, 1))
        sizes.add(store.allocated // (2 * 7 * 4))
        assert store.allocated <= store.nbytes * 9 / 8 + 64 * 2 * 7 * 4
    assert len(sizes) < 30
    keys, values = store.read(torch.float32)
    assert torch.equal(keys, tokens(0, 1000)[0]) and torch.equal(values, tokens(0, 1000)[1])
    store.drop_before(990, 10)
    assert store.nbytes == 10 * 2 * 7 * 4 and store.allocated == 64 * 2 * 7 * 4
    for i in range(1000, 1200):
        store.append(*tokens(i, 1))
        store.drop_before(i - 9, 10)
        assert torch.equal(store.read(torch.float32)[0], tokens(i - 9, 10)[0])
    assert store.allocated == 64 * 2 * 7 * 4
    with pytest.raises(
        longspan.LongspanError, match=r"the cache contains float32 \[1, 2, 4\], the new tokens have float64"
    ):
        store.append(*(x.double() for x in tokens(0, 1)))


def test_quantized_vectors_are_off_by_half_a_step() -> None:
    """A nonfinite element makes its vector NaN; a vector of zeros stays zero."""
    x = torch.randn(64, 7)
    x[0], x[1, 3] = 0, 1e4
    for name, form in QUANTIZED_FORMATS.items():
        largest = x.abs().amax(-1, keepdim=True)
        half_step = largest / 254 if name == "int8" else torch.maximum(x.abs() / 16, largest / 458752)
        back = form.decode(*form.encode(x), torch.float32)
        assert bool(((back - x).abs() <= 1.001 * half_step).all()), name
        for bad in (torch.nan, torch.inf):
            broken = form.decode(*form.encode(x.index_fill(1, torch.tensor([1]), bad)), torch.bfloat16)
            assert broken.isnan().all()


@pytest.mark.confirms  # the compiler slows down all later tests of its process
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's inductor needs a C++ compiler (g++) on CPU")
def test_a_long_fp8_cache_is_decoded_by_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU by torch's compiler for C++; other lengths run the same program. Without a compiler it warns once."""
    from torch._inductor import metrics

    form = QUANTIZED_FORMATS["fp8"]
    stored, scales = form.encode(torch.randn(2, 3, 70, 16))
    expected = form.decode(stored, scales, torch.bfloat16)
    monkeypatch.setattr(quantize, "_COMPILED_FROM", 1)
    monkeypatch.setattr(quantize, "compiles_fp8", lambda _: True)
    quantize.one_kernel.cache_clear()
    metrics.reset()
    for start, stop in ((0, 69), (3, 70), (3, 68)):  # as a cache of more capacity has them
        parts = stored[:, :, start:stop], scales[:, :, start:stop]
        assert torch.equal(form.decode(*parts, torch.bfloat16), expected[:, :, start:stop])
    assert metrics.generated_kernel_count == 1
    quantize.one_kernel.cache_clear()
    monkeypatch.setattr(torch, "compile", lambda *_, **__: lambda *_: 1 / 0)
    with pytest.warns(UserWarning, match="without the compiler"):
        assert torch.equal(form.decode(stored, scales, torch.bfloat16), expected)
    assert torch.equal(form.decode(stored, scales, torch.bfloat16), expected)
    quantize.one_kernel.cache_clear()


@pytest.mark.parametrize("v_dim", [8, 6])
def test_tokens_are_quantized_alike_one_by_one_and_together(v_dim: int) -> None:
    k, v = torch.randn(2, 3, 70, 8), torch.randn(2, 3, 70, v_dim)
    for name in ("int8", "fp8"):
        whole, stepwise = LayerCache(dtype=name), LayerCache(dtype=name)  # type: ignore[arg-type]
        whole.append(k, v)
        for i in range(70):
            stepwise.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
        assert all(torch.equal(a, b) for a, b in zip(whole.parts, stepwise.parts, strict=True))


def _quantized(expected: tuple[Tensor, Tensor], limits: dict[str, float]) -> None:
    for ring in (1, 2):
        model, _ = parallelized("Llama", ring, False)
        exact = longspan.ShardedCache(model, room=PROMPT + NEW)
        generated(model, {**prompt(), "past_key_values": exact})
        for dtype, limit in limits.items():
            cache = longspan.ShardedCache(model, dtype=dtype)
            found = generated(model, {**prompt(), "past_key_values": cache})
            logits = found[1]
            with mock.patch.object(layer_cache, "_TILE_ON_CPU", 1):  # four tokens at a time
                tiled = longspan.ShardedCache(model, dtype=dtype)
                check_generated(generated(model, {**prompt(), "past_key_values": tiled}), found)
            error = float((logits - expected[1]).norm() / expected[1].norm())
            assert limit / 100 < error < limit, (dtype, error)
            assert cache.nbytes == exact.nbytes * (8 + 4) // (4 * 8)  # head_dim 8 in fp32


def test_quantized_dtypes_on_a_model(pool2: RankPool) -> None:
    pool2.run(_quantized, plain("Llama"), {"int8": 0.01, "fp8": 0.05})


def _saved(folder: Path, name: str, dtype: str) -> None:
    model, _ = parallelized(name, 2, False)
    cache = longspan.ShardedCache(model, dtype=dtype)
    for _ in range(2):  # the second replaces the first
        if cache.get_seq_length() == 0:
            generated(model, {**prompt(), "past_key_values": cache})
        cache.save(folder)


def _loaded(folder: Path, name: str, second: Tensor, expected: Any, ring: int) -> Any:
    """Generate a second turn with a cache that another mesh has saved."""
    model, _ = parallelized(name, ring, False)
    cache = longspan.ShardedCache.load(folder, model)
    assert cache.get_seq_length() == PROMPT + NEW - 1
    out = generated(model, {"input_ids": second, "past_key_values": cache})
    if expected is not None:
        check_generated(out, expected)
    return out


def _not_saved(folder: Path, by_library: bool) -> str:
    """Return the message of a save while rank 1's disk is full; `by_library`: safetensors raises its own error."""
    text = "No space left on device"
    full = mock.Mock(side_effect=SafetensorError(text) if by_library else OSError(errno.ENOSPC, text))
    save = full if dist.get_rank() == 1 else files.save_file
    with mock.patch.object(files, "save_file", save), pytest.raises(longspan.LongspanError) as caught:
        _saved(folder, "Llama", "exact")
    return str(caught.value)


def _not_loaded(folder: Path, name: str) -> str:
    model, _ = parallelized(name, 1, False)
    with pytest.raises(longspan.LongspanError) as error:
        longspan.ShardedCache.load(folder, model)
    return str(error.value)


@pytest.mark.parametrize(("name", "dtype"), [("Gemma3Text", "exact"), ("Llama", "fp8")])
def test_a_saved_cache_loads_on_another_mesh(get_pool: Any, tmp_path: Path, name: str, dtype: str) -> None:
    folder, more = tmp_path / "cache", prompt(n=9, seed=8)["input_ids"]
    second = torch.cat([plain(name)[0], more], 1)
    expected = generated(build(name).eval(), {"input_ids": second}) if dtype == "exact" else None
    get_pool(4).run(_saved, folder, name, dtype)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache"]
    assert len(list(folder.glob("part-*"))) == 4
    outs = get_pool(2).run(_loaded, folder, name, second, expected, 1)
    outs += get_pool(4).run(_loaded, folder, name, second, expected, 4)
    for out in outs:
        check_generated(out, outs[0])  # quantized too: its bytes are read as they were written


def test_an_incomplete_cache_is_refused(pool2: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    (full,) = set(pool2.run(_not_saved, folder, True))
    assert full.startswith("rank 1 failed: ") and "part-1.safetensors cannot be written" in full and "No space" in full
    (full,) = set(pool2.run(_not_saved, folder, False))
    assert full == f"rank 1 failed: [Errno {errno.ENOSPC}] No space left on device"
    assert not folder.exists()
    pool2.run(_saved, folder, "Llama", "exact")
    other = set(pool2.run(_not_loaded, folder, "Qwen3"))
    assert len(other) == 1 and 'model_type: "llama" there, "qwen3" here' in other.pop()
    part = folder / "part-1.safetensors"
    whole, index = part.read_bytes(), json.loads((folder / "index.json").read_text())
    for content in (whole[:-1], None):
        part.write_bytes(content) if content is not None else part.unlink()
        messages = pool2.run(_not_loaded, folder, "Llama")
        assert any("is damaged or incomplete" in text or "No such file" in text for text in messages)
    part.write_bytes(whole)
    for change in ({"model": None}, {"parts": [{}]}):
        (folder / "index.json").write_text(json.dumps({**index, **change}))
        messages = pool2.run(_not_loaded, folder, "Llama")
        assert len(set(messages)) == 1 and f"{folder} is damaged or incomplete" in messages[0]
    (folder / "index.json").unlink()
    assert "it has no index.json, which is written last" in pool2.run(_not_loaded, folder, "Llama")[0]
    with pytest.raises(RankError, match="exists and is not a cache"):
        pool2.run(_saved, folder, "Llama", "exact")
