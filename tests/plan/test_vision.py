"""The planner on vision-language models: weights, collectives to the byte, memory within a tenth, flags, errors."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import longspan
from longspan.cli import main
from longspan.comm.mesh import MeshGroups
from longspan.core.errors import LongspanError
from longspan.core.layout import choose_layout, split_by_cost
from longspan.core.memory import LONGEST, Memory
from longspan.hf.model.vision import tower_blocks
from longspan.plan import Job, ModelShape, ParallelConfig, cost, longest_context, read_hardware, read_model
from longspan.plan.cost.times import model_flops
from longspan.plan.from_model import shape_of
from longspan.plan.job import CostContext
from longspan.plan.names import MODELS
from longspan.plan.tower import PictureShape, read_pictures, shares, tower_flops
from tests.choose import confirming
from tests.counting import count_sent
from tests.hf.pictures import END, FAMILIES, GRIDS, IMAGE, START, VIDEO, Rows, batch, build, rows_for
from tests.host_memory import at_rest, peak_of
from tests.models import gradients, sharding
from tests.plan.jobs import job_on
from tests.pool import RankPool

CPU = read_hardware("cpu")
ONE_DEVICE = longspan.SequenceSharding(MeshGroups("cpu"))
QWEN = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe")


# ---------------------------------------------------------------------------------------------------------------------
# Weights.


def _check_weights(shape: ModelShape, config: Any) -> None:
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    tower = shape.tower
    assert tower is not None
    embedding, *tail = shape.root
    parts = [("model.visual", tower.before)]
    parts += [(f"model.visual.blocks.{i}", tower.block) for i in range(tower.depth)]
    parts += [("model.visual", tower.after), ("", (embedding,))]
    parts += [(f"model.language_model.layers.{i}", layer.parameters) for i, layer in enumerate(shape.layers)]
    parts += [("", tuple(tail))]
    ours = [(f"{prefix}.{p.name}".lstrip("."), p.shape) for prefix, weights in parts for p in weights]
    theirs = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    assert ours == theirs if "moe" not in config.model_type else sorted(ours) == sorted(theirs)
    assert shape.params == sum(p.numel() for p in model.parameters())
    assert shape.tied == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)


@pytest.mark.parametrize("family", QWEN)
def test_weights_are_those_of_transformers(family: str) -> None:
    config = build(family).config
    _check_weights(shape_of(config), config)


@pytest.mark.parametrize("name", ["qwen2.5-vl-7b", "qwen3-vl-4b"])
def test_built_in_models(name: str) -> None:
    import transformers

    values = MODELS[name]["config"]
    config = transformers.CONFIG_MAPPING[values["model_type"]].from_dict(values)
    _check_weights(read_model(name), config)
    assert shape_of(config).params == read_model(name).params


def test_parameters_of_the_published_checkpoints() -> None:
    published = {"qwen2.5-vl-7b": 8_292_166_656, "qwen2.5-vl-3b": 3_754_622_976, "qwen3-vl-8b": 8_767_123_696}
    assert {name: read_model(name).params for name in published} == published
    assert read_model("Qwen/Qwen2.5-VL-7B-Instruct").name == "qwen2.5-vl-7b"


# ---------------------------------------------------------------------------------------------------------------------
# Shares, FLOPs.


def test_pictures_of_flags() -> None:
    qwen2_5, qwen3 = (read_model(name).tower for name in ("qwen2.5-vl-7b", "qwen3-vl-8b"))
    assert qwen2_5 is not None and qwen3 is not None
    video = read_pictures("--video", "255x450x330", qwen2_5)
    assert video == PictureShape("video", 128, 32, 24)  # 448 x 336 pixels, two frames a patch
    assert video.tokens(qwen2_5) == 128 * 192 + 2 and video.tokens(qwen3) == 128 * (192 + 2)
    images = read_pictures("--images", "3x1024x10", qwen3)
    assert images == PictureShape("image", 3, 64, 2) and images.tokens(qwen3) == 3 * (32 + 2)
    for text in ("448x448", "0x448x448", "many"):
        with pytest.raises(LongspanError, match=rf"--video {text}"):
            read_pictures("--video", text, qwen3)


def test_shares_are_those_of_the_code() -> None:
    shape = shape_of(build("Qwen3VL").config)
    for units, ranks in ((1, 4), (5, 4), (8, 4), (9, 8), (7, 3)):
        job = Job(context=600, pictures=(PictureShape("video", units, 4, 6),))
        (share,) = shares(CostContext(shape, job.on(ulysses=ranks)))
        spans = split_by_cost([24] * units, ranks)
        assert share.patches == max(max(stop - start, 1) for start, stop in spans) * 24
        held = [(a, b) for rank in range(ranks) for a, b in choose_layout("auto", 1, ranks).spans(600, rank)]
        assert share.rows == max(sum(a <= 1 + 8 * i + j < b for i in range(units) for j in range(6)) for a, b in held)


def test_flops_of_a_tower() -> None:
    """A matrix is used once per patch, a merger's once per four; 112-pixel windows are cut at the edges."""
    model = read_model("qwen2.5-vl-7b")
    tower = model.tower
    assert tower is not None
    job = Job(context=8192, pictures=(PictureShape("video", 8, 32, 20),))
    products, attention = tower_flops(CostContext(model, job.on(ulysses=4)), largest=False)
    patches, d = 8 * 640, 1280
    blocks = 32 * (4 * d * d + 3 * d * 3420)
    assert products == 2 * patches * (blocks + 1176 * d + (16 * d * d + 4 * d * 3584) / 4)
    windows = 4 * (2 * (8 * 8) ** 2 + (8 * 4) ** 2)  # four rows of windows, two of them 8 x 8 patches, one 8 x 4
    assert attention == 8 * 4 * d * (4 * 640**2 + 28 * windows)
    most, _ = tower_flops(CostContext(model, job.on(ulysses=4)), largest=True)
    assert most == products / 4
    text = Job(context=8192)
    assert model_flops(model, job) - model_flops(model, text) == pytest.approx(3 * (products + attention))


@pytest.mark.parametrize("family", ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL"])
def test_flops_are_those_that_torch_counts(family: str) -> None:
    """Of frames that windows do not divide; eager attention, whose products torch counts."""
    import transformers

    config, pictures = _config(family), (PictureShape("video", 3, 10, 6),)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    whole = _batch(family, pictures, 5)
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model.model.get_video_features(whole["pixel_values_videos"], whole["video_grid_thw"])
    c = CostContext(shape_of(config), Job(context=100, pictures=pictures))
    assert sum(tower_flops(c, largest=False)) == counted.get_total_flops()


# ---------------------------------------------------------------------------------------------------------------------
# Collectives, to the byte.

VIDEO_ROW: Rows = ((("video", 3, 4, 4), 20),)
FRAMES: Rows = ((("video", 5, 4, 6), 20),)
BOTH: Rows = ((("image", 1, 4, 4), ("image", 1, 4, 4), ("video", 5, 4, 6), 20),)
COUNTED: list[tuple[str, Rows, ParallelConfig, dict[str, Any]]] = [
    ("Qwen2_5_VL", VIDEO_ROW, ParallelConfig(ulysses=2), {}),
    ("Qwen2_5_VL", ((30,),), ParallelConfig(ulysses=2), {}),
    ("Qwen3VL", BOTH, ParallelConfig(ring=2, ulysses=2), {"dtype": "bf16"}),
    ("Qwen3VL", FRAMES, ParallelConfig(ring=4), {"memory": Memory(checkpointing="full")}),
    ("Qwen3VLMoe", VIDEO_ROW, ParallelConfig(data=2, ulysses=2), {}),
    ("Qwen2_5_VL", VIDEO_ROW, ParallelConfig(ulysses=2), {"weight_sharding": False}),
    ("Qwen2_5_VL", ((30,),), ParallelConfig(ulysses=2), {"weight_sharding": False}),
    ("Qwen2VL", BOTH, ParallelConfig(data=2, ulysses=2), {}),
    ("Qwen2_5_VL", BOTH, ParallelConfig(ulysses=4), {"tied": True}),
    ("Qwen2_5_VL", ((30,),), ParallelConfig(ulysses=2), {"tied": True}),
]
CONFIRMED = (1, 6, 7, 9)


@pytest.mark.parametrize(
    ("family", "rows", "mesh", "options"),
    [*(case for at, case in enumerate(COUNTED) if at not in CONFIRMED), *confirming(COUNTED[at] for at in CONFIRMED)],
)
def test_a_step_sends_what_is_planned(
    family: str, rows: Rows, mesh: ParallelConfig, options: dict[str, Any], get_pool: Callable[[int], RankPool]
) -> None:
    """Of each call the rank that sends most. Real ranks, since torch's fake group refuses a rank that sends nothing."""
    logs = get_pool(mesh.ranks).run(_sent, family, rows, mesh, options)
    by_op = [{op: [size for of, size in log if of == op] for op, _ in log} for log in logs]
    measured = Counter[tuple[str, int]]()
    for op in by_op[0]:
        measured.update((op, most) for most in map(max, zip(*(log[op] for log in by_op), strict=True)) if most)
    tied = {"tie_word_embeddings": True} if options.get("tied") else {}
    asked = {key: value for key, value in options.items() if key != "tied"}
    context = batch(family, rows)["input_ids"].shape[1]
    job = job_on(mesh, context=context, batch=mesh.data, pictures=_pictures(rows), **{"dtype": "fp32", **asked})
    planned = Counter[tuple[str, int]]()
    for c in cost(shape_of(build(family, **tied).config), job, CPU).comm:
        planned[c.op, c.bytes_per_gpu] += c.count
    assert measured == planned


def _pictures(rows: Rows) -> tuple[PictureShape, ...]:
    """Images of a row must be equal."""
    found = dict[str, PictureShape]()
    for part in rows[0]:
        if not isinstance(part, int):
            kind, frames, height, width = part
            found[kind] = PictureShape(kind, frames + (found[kind].units if kind in found else 0), height, width)
    return tuple(found.values())


def _sent(family: str, rows: Rows, mesh: ParallelConfig, options: dict[str, Any]) -> list[tuple[str, int]]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    sp = sharding(data=mesh.data, ring=mesh.ring)
    tied = {"tie_word_embeddings": True} if options.get("tied") else {}
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if options.get("dtype") == "bf16" else None
    fsdp, memory = options.get("weight_sharding", True), options.get("memory", "fastest")
    model = longspan.parallelize(build(family, **tied), sp, fsdp=fsdp, mp_policy=policy, memory=memory).train()
    whole = batch(family, rows)
    with count_sent() as sent:
        model(**whole).loss.backward()
    return [(one.op, one.bytes) for one in sent]


# ---------------------------------------------------------------------------------------------------------------------
# Memory.

_TEXT = {
    "hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 512,
    "num_hidden_layers": 2, "max_position_embeddings": 1 << 20,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
}  # fmt: skip
_VISION = {"depth": 4, "hidden_size": 64, "intermediate_size": 160, "num_heads": 4, "patch_size": 4}
LARGER: dict[str, dict[str, Any]] = {
    "Qwen2VL": {**_VISION, "embed_dim": 64, "hidden_size": 128, "mlp_ratio": 2},
    "Qwen2_5_VL": {**_VISION, "out_hidden_size": 128, "window_size": 16, "fullatt_block_indexes": [1]},
    "Qwen3VL": {
        **_VISION, "out_hidden_size": 128, "num_position_embeddings": 256, "deepstack_visual_indexes": [0, 2],
    },
}  # fmt: skip
CHECKPOINTED = Memory(checkpointing="full")
FP32 = {"dtype": "fp32"}
Case = tuple[str, tuple[PictureShape, ...], int, ParallelConfig, dict[str, Any]]


def _video(frames: int) -> tuple[PictureShape, ...]:
    return (PictureShape("video", frames, 16, 16),)


MEASURED = [
    ("Qwen3VL", _video(8), 200, ParallelConfig(ulysses=2), {"dtype": "bf16"}),
    *confirming(
        [
            ("Qwen2_5_VL", _video(32), 800, ParallelConfig(ulysses=2), {**FP32, "memory": LONGEST}),
            ("Qwen2VL", (PictureShape("image", 4, 16, 16), *_video(4)), 200, ParallelConfig(ulysses=2), FP32),
            ("Qwen2_5_VL", _video(32), 800, ParallelConfig(data=2, ulysses=2),
             {"dtype": "bf16", "memory": CHECKPOINTED}),
        ]
    ),
]  # fmt: skip


@pytest.mark.parametrize(("family", "pictures", "text", "mesh", "options"), MEASURED)
def test_the_plan_of_cpu_ranks_is_an_upper_bound(
    family: str, pictures: tuple[PictureShape, ...], text: int, mesh: ParallelConfig, options: dict[str, Any],
    get_pool: Callable[[int], RankPool], tmp_path: Path,
) -> None:  # fmt: skip
    context = _batch(family, pictures, text)["input_ids"].shape[1]
    job = job_on(mesh, context=context, batch=mesh.data, pictures=pictures, **options)
    plan = cost(shape_of(_config(family)), job, CPU)
    planned, tries, least = plan.memory_total_bytes, 6, float("inf")
    while least > planned and tries:  # late threads of gloo only add, as in test_memory.py
        found = get_pool(mesh.ranks).run(_peak_of_a_step, family, pictures, text, mesh, options, tmp_path)
        least, tries = min(least, max(found)), tries - 1
    assert least <= planned <= 2.2 * least, plan.memory_bytes


def _config(family: str) -> Any:
    import transformers

    text = {**_TEXT, "head_dim": 16} if family == "Qwen3VL" else _TEXT
    ids = {
        "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END,
    }  # fmt: skip
    return getattr(transformers, f"{family}Config")(text_config=text, vision_config=LARGER[family], **ids)


def _batch(family: str, pictures: tuple[PictureShape, ...], text: int) -> dict[str, torch.Tensor]:
    tower = shape_of(_config(family)).tower
    assert tower is not None
    ids, kinds, whole = list[int](), list[int](), dict[str, torch.Tensor]()
    for each in pictures:
        of_video = each.kind == "video"
        grid = [[each.units, each.height, each.width]] if of_video else [[1, each.height, each.width]] * each.units
        key = "pixel_values_videos" if of_video else "pixel_values"
        whole[key] = torch.randn(each.units * each.patches, tower.patch_elements)
        whole[f"{each.kind}_grid_thw"] = torch.tensor(grid)
        runs = each.runs(tower)
        rows = each.units * each.rows(tower) // runs
        ids += [START, *[VIDEO if of_video else IMAGE] * rows, END] * runs
        kinds += [0, *[2 if of_video else 1] * rows, 0] * runs
    ids += torch.randint(END + 1, 512, (text,)).tolist()
    tokens = torch.tensor([ids])
    kinds_of = torch.tensor([[*kinds, *[0] * text]])
    return {"input_ids": tokens, "labels": tokens, "mm_token_type_ids": kinds_of, **whole}


def _peak_of_a_step(
    family: str,
    pictures: tuple[PictureShape, ...],
    text: int,
    mesh: ParallelConfig,
    options: dict[str, Any],
    folder: Path,
) -> int:
    """Bytes of this rank's weights, optimizer state and pixels, and the rise above them in a step."""
    import transformers
    from torch.distributed.fsdp import MixedPrecisionPolicy

    sp = sharding(data=mesh.data, ring=mesh.ring)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(_config(family)).float()
    fsdp, memory = options.get("weight_sharding", True), options.get("memory", "fastest")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if options["dtype"] == "bf16" else None
    model = longspan.parallelize(model, sp, fsdp=fsdp, mp_policy=policy, memory=memory).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(of: dict[str, torch.Tensor]) -> None:
        model(**of).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # Make the optimizer's state.
    step(_batch(family, tuple(PictureShape(each.kind, 1, 4, 4) for each in pictures), 32))
    whole = _batch(family, pictures, text)
    pixels = sum(x.nbytes for key, x in whole.items() if key.startswith("pixel"))
    resting = at_rest(model, optimizer)
    peak = peak_of(lambda: step(whole), folder / f"trace-{sp.rank}-{sp.data_rank}.json")
    torch.set_num_threads(threads)
    return resting + pixels + peak


# ---------------------------------------------------------------------------------------------------------------------
# `memory="auto"`.

LONG: Rows = ((("video", 24, 8, 8), 20),)
SHORT: Rows = ((("video", 1, 4, 4), 600),)  # more tokens, fewer patches


def _far(family: str) -> Any:
    """Return a model with enough positions for `SHORT`."""
    return build(family, text_config={**GRIDS[family]["text_config"], "max_position_embeddings": 4096})


def _room(family: str) -> float:
    """Return memory with which `LONG` needs memory options, and `SHORT` none."""
    context = batch(family, LONG)["input_ids"].shape[1]
    shape = shape_of(build(family).config)
    jobs = (
        Job(context=context, dtype="fp32", weight_sharding=False, memory=memory, pictures=_pictures(LONG))
        for memory in (Memory(), LONGEST)
    )
    return sum(cost(shape, job, CPU).memory_total_bytes for job in jobs) / 2


def _limit(monkeypatch: pytest.MonkeyPatch, room: float) -> None:
    limited = dataclasses.replace(CPU, memory_bytes=room)
    monkeypatch.setattr("longspan.hf.memory.hardware_of", lambda device, _=None: limited)


@pytest.mark.parametrize("family", ["Qwen2_5_VL", *confirming(["Qwen3VL"])])
def test_auto_counts_pictures(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More patches need memory options, which hold in that forward's tower already."""
    _limit(monkeypatch, _room(family))
    plain, whole = _far(family).train(), batch(family, LONG)
    plain(**whole).loss.backward()
    truth = gradients(plain)
    model = longspan.parallelize(_far(family), ONE_DEVICE, memory="auto").train()
    model(**batch(family, SHORT)).loss.backward()
    state = model.longspan_state.memory
    assert state.options == Memory()
    model.zero_grad()
    runs = []
    model.model.visual.blocks[0].norm1.register_forward_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    model(**whole).loss.backward()
    assert state.options.checkpointing != "none" and len(runs) == 2 and "does not fit" in longspan.explain(model)
    for name, grad in gradients(model).items():
        assert torch.allclose(grad, truth[name], rtol=1e-3, atol=1e-6), name


def _options_of_replicas(room: float) -> Memory:
    sp = sharding(data=2)
    with pytest.MonkeyPatch.context() as patch:
        _limit(patch, room)
        model = longspan.parallelize(_far("Qwen2_5_VL"), sp, fsdp=False, memory="auto").train()
        model(**batch("Qwen2_5_VL", LONG if sp.data_rank else SHORT)).loss.backward()
    found: Memory = model.longspan_state.memory.options
    return found


def test_replicas_choose_for_the_one_with_most_patches(pool2: RankPool) -> None:
    first, second = pool2.run(_options_of_replicas, _room("Qwen2_5_VL"))
    assert first == second != Memory()


@pytest.mark.parametrize("family", FAMILIES)
def test_auto_reads_every_tower_that_can_be_sharded(family: str) -> None:
    model = longspan.parallelize(build(family), ONE_DEVICE, memory="auto").train()
    model(**batch(family, rows_for(family))).loss.backward()
    state = model.longspan_state.memory
    tower = state.auto.shape.tower
    assert tower is not None and sum(state.auto.patches) > 0
    assert state.auto.shape.params == sum(p.numel() for p in build(family).parameters())
    sizes = model.config.vision_config
    assert (tower.depth, tower.width) == (len(tower_blocks(model)), sizes.to_dict().get("embed_dim", sizes.hidden_size))


# ---------------------------------------------------------------------------------------------------------------------
# What is refused; the command.


def test_pictures_of_one_size_are_refused() -> None:
    tower = shape_of(build("Llava").config).tower
    assert tower is not None
    with pytest.raises(LongspanError, match="--images 2x336x336: this model's processor scales pictures to one size"):
        read_pictures("--images", "2x336x336", tower)


def test_jobs_that_cannot_be() -> None:
    model = read_model("qwen2.5-vl-7b")
    job = Job(context=1000, pictures=(PictureShape("video", 8, 32, 32),))
    with pytest.raises(LongspanError, match="images and video are 2,050 tokens, and the context has 1,000"):
        cost(model, job, CPU)
    with pytest.raises(LongspanError, match="a vision tower is not sharded over a tensor axis; use `ulysses`"):
        cost(model, Job(context=4096).on(tensor=2), CPU)
    with pytest.raises(LongspanError, match="qwen3-8b has no vision tower"):
        cost(read_model("qwen3-8b"), Job(context=4096, pictures=job.pictures), CPU)
    h100 = read_hardware("h100")
    assert longest_context(model, job.on(ulysses=8), h100) > 100_000
    longer = Job(context=1000, pictures=(PictureShape("video", 10_000, 32, 32),))
    assert longest_context(model, longer.on(ulysses=8), h100) == 0


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    video = ["--context", "256k", "--video", "1024x448x448"]
    file = tmp_path / "config.json"
    build("Qwen2_5_VL").config.to_json_file(file)
    assert main(["plan", "--model", "qwen2.5-vl-7b", "--gpus", "8", *video, "--details"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "images and video: 131,074 tokens of 524,288 patches, of which one GPU encodes up to 65,536" in text
    assert "vision pixels of the batch" in text and "embeddings to all_to_all sequence 1" in text
    assert "plan.yaml" not in text and "its mesh is longspan.init_mesh(ring=2, ulysses=4)" in text
    images = ["--gpus", "2", "--gpu", "cpu", "--context", "4k", "--images", "9x56x56"]
    assert main(["plan", "--model", str(file), *images, "--details"]) == 0
    assert "images and video:" in capsys.readouterr().out
    for words, reason in (
        (["--model", "qwen3-8b", *video], "--video 1024x448x448: qwen3-8b has no vision tower; leave --video out"),
        (["--model", "qwen2.5-vl-7b", *video, "--mode", "prefill"], "--video 1024x448x448 is for --mode train"),
    ):
        assert main(["plan", *words]) == 2
        assert reason in capsys.readouterr().err
