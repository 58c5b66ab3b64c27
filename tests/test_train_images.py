"""`longspan train` on chats with images: the losses of a plain loop with the model's processor, and clear errors."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForImageTextToText, AutoProcessor, Qwen2_5_VLConfig
from transformers.processing_utils import ProcessorMixin

from longspan.core.errors import LongspanError
from longspan.core.sections import make, replace
from longspan.data.rows import document_of
from longspan.data.source import DocumentSource
from longspan.data.stream import Sequence, collate
from longspan.data.tokenizer import Tokenizer
from longspan.hf.prompts import read_image
from longspan.train import TrainConfig
from longspan.train.config import TuningSection
from longspan.train.inputs import check_inputs, model_origin, open_local
from longspan.train.old_resolve import resolve_steps
from longspan.train.optimizer import tuned
from tests.chats import PICTURE_CHAT, WORDS, image, processor, tokenizer, write_rows
from tests.choose import confirming
from tests.models import widened
from tests.pictures import IMAGE, build
from tests.pool import RankPool
from tests.tolerance import excess_of_losses, roughly
from tests.training import log_of, losses_of, train, write_config

PREFIXES = (
    "{% for m in messages %}{{ '<a>' if m['role'] == 'assistant' else '<u>' }}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}<e>{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
"""The text of `PICTURE_CHAT`, without marks on what the assistant generates."""

FAMILIES = ("Llava", "Qwen2_5_VL")


class QwenImages(ProcessorMixin):
    """Qwen2.5-VL's processor without that of videos, which needs torchvision."""

    image_token, image_token_id, image_ids, return_mm_token_type_ids = "<image>", IMAGE, [IMAGE], True

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def replace_image_token(self, image_inputs: Any, image_idx: int, **_: Any) -> str:
        return self.image_token * int(image_inputs["image_grid_thw"][image_idx].prod() // 4)


AutoProcessor.register(Qwen2_5_VLConfig, QwenImages, exist_ok=True)


def _save(path: Path, family: str, template: str = PICTURE_CHAT) -> Path:
    build(family).save_pretrained(path)
    made = processor()
    if family == "Qwen2_5_VL":
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        images = Qwen2VLImageProcessorPil(size={"shortest_edge": 64, "longest_edge": 1024}, patch_size=4, merge_size=2)
        made = QwenImages(images, tokenizer(), chat_template=template)
    made.save_pretrained(path)
    (path / "chat_template.jinja").write_text(template)
    return path


def _row(number: int, images: int, *, column: bool) -> dict[str, Any]:
    """A chat of two turns. Its images are content parts with a path, or a column in the order of the parts."""
    names = [f"{(number + i) % 4}.png" for i in range(images)]
    parts = [{"type": "image"} if column else {"type": "image", "path": name} for name in names]
    words = " ".join(WORDS[(number * 3 + i) % len(WORDS)] for i in range(3 + number))
    content = [*parts[:1], {"type": "text", "text": words}, *parts[1:]]
    turns = [("user", content), ("assistant", "the sea was calm"), ("user", words), ("assistant", f"a ship {words}")]
    messages = [{"role": r, "content": c if isinstance(c, list) else [{"type": "text", "text": c}]} for r, c in turns]
    return {"messages": messages} | ({"images": names} if column else {})


ROWS = [_row(0, 1, column=True), _row(1, 2, column=True), _row(2, 1, column=True), _row(3, 0, column=True)]


@pytest.fixture(scope="module", params=FAMILIES)
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    folder = _save(tmp_path_factory.mktemp(request.param), request.param)
    for at in range(4):
        image(at).resize((16 + 8 * at, 16)).save(folder / f"{at}.png")
    return _config(folder, write_rows(folder / "rows.jsonl", ROWS))


def _config(folder: Path, data: Path, **changes: Any) -> TrainConfig:
    base: dict[str, Any] = {
        "model": str(folder), "data": str(data), "context": 128, "batch": 4, "micro_batch": 2, "steps": 3, "lr": 1e-2,
        "clip": 0.5, "dtype": "fp32", "log_every": 1, "save_every": 0, "shuffle": 0, "schedule": "constant",
        "out": folder / "run", "export": "never",
    }  # fmt: skip
    return make(TrainConfig, **base | changes)


def _plain_run(config: TrainConfig, dtype: torch.dtype = torch.float32) -> tuple[dict[int, float], dict[int, float]]:
    """Losses and gradients' norms of the same training by transformers alone, on the same four rows in every step."""
    folder = Path(str(config.model.model))
    made = AutoProcessor.from_pretrained(folder)
    rows = []
    for row in ROWS:
        messages, names = [], iter(row["images"])
        for message in row["messages"]:
            parts = [
                p | ({"path": str(folder / next(names))} if p["type"] == "image" else {}) for p in message["content"]
            ]
            messages.append({"role": message["role"], "content": parts})
        out = made.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_tensors="pt", return_assistant_tokens_mask=True
        )
        trained = torch.as_tensor(out.pop("assistant_masks")).bool()
        rows.append(dict(out) | {"labels": out["input_ids"].where(trained, -100)})
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).train()
    model = widened(model) if dtype == torch.float64 else model
    matrices, others = ([p for p in model.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.optimizer.lr, betas=config.optimizer.betas)
    labels = sum(int((row["labels"][:, 1:] != -100).sum()) for row in rows)
    losses, norms = {}, {}
    for step in range(1, config.steps + 1):
        losses[step] = 0.0
        for row in rows:
            batch = {k: x.to(dtype) if x.is_floating_point() else x for k, x in row.items()}
            loss = model(**batch, num_items_in_batch=labels, use_cache=False).loss
            loss.backward()
            losses[step] += loss.item()
        norms[step] = clip_grad_norm_(model.parameters(), config.optimizer.clip).item()
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def _train(config: TrainConfig) -> None:
    """Train on this rank, which imports this module and so has the processor."""
    train(config)


def test_losses_and_gradients_are_those_of_a_plain_loop(config: TrainConfig, pool2: RankPool) -> None:
    """The tower is trained, also if the last forward of a step, or that of one replica, has no image."""
    plain, exact = _plain_run(config), _plain_run(config, torch.float64)
    assert plain[0][3] < plain[0][1] - 0.1
    runs = {"alone": config, "ring, one row a forward": replace(config, ring=2, micro_batch=1)}
    if "Llava" in str(config.model.model):
        runs["data"] = replace(config, data_degree=2, micro_batch=1, reduce="each")
    for name, run in runs.items():
        run = replace(run, out=config.out / name)
        train(run) if name == "alone" else pool2.run(_train, run, timeout=240)
        norms = {record["step"]: record["grad_norm"] for record in log_of(run.out)}
        assert excess_of_losses(losses_of(run.out), plain[0], exact[0]) <= 1, name
        assert excess_of_losses(norms, plain[1], exact[1]) <= 1, name


def test_bf16_stays_near_fp32(config: TrainConfig, pool2: RankPool) -> None:
    """FSDP casts the weights of the tower, too; one process autocasts the inputs of its products."""
    half = replace(config, out=config.out / "bf16", dtype="bf16", steps=1)
    if "Llava" in str(config.model.model):
        train(half)
    else:
        pool2.run(_train, replace(half, data_degree=2, micro_batch=1), timeout=240)
    assert abs(losses_of(half.out)[1] / losses_of(config.out / "alone")[1] - 1) < roughly(torch.bfloat16)


def test_it_evaluates_and_resumes(folder: Path, pool2: RankPool) -> None:
    """The loss of evaluation before the first step is that of the first step, which has the same rows."""
    data = write_rows(folder / "rows.jsonl", ROWS)
    config = _config(folder, data, eval_data=(str(data),), eval_every=10, data_degree=2, micro_batch=1)
    pool2.run(_train, replace(config, steps=2), timeout=240)
    pool2.run(_train, replace(config, export="end"), timeout=240)
    first = json.loads((config.out / "evaluation.jsonl").read_text().splitlines()[0])
    losses = losses_of(config.out)
    assert len(losses) == 3 and abs(first["loss"] / losses[1] - 1) < roughly(torch.float32)
    AutoProcessor.from_pretrained(config.out / "hf").apply_chat_template(ROWS[0]["messages"])
    before, after = (AutoModelForImageTextToText.from_pretrained(x) for x in (config.model.model, config.out / "hf"))
    moved = {
        name: not torch.equal(p, q) for (name, p), q in zip(before.named_parameters(), after.parameters(), strict=True)
    }
    assert any(changed for name, changed in moved.items() if "vision" in name or "visual" in name)


@pytest.mark.parametrize("optimizer", ["muon", *confirming(["adamw", "adamw8bit"])])
def test_a_run_resumes_before_its_first_image(folder: Path, tmp_path: Path, optimizer: str) -> None:
    """Its checkpoint has the optimizer's state of the whole tower, and of the layers that the model does not use."""
    if optimizer == "adamw8bit":
        pytest.importorskip("torchao.optim")
    data = write_rows(folder / "late.jsonl", [ROWS[3], ROWS[0]])
    config = _config(folder, data, optimizer=optimizer, batch=1, micro_batch=1, steps=None, epochs=1)
    config, _ = resolve_steps(config, open_local(config))
    whole, parts = replace(config, out=tmp_path / "whole"), replace(config, out=tmp_path / "parts")
    for run in (whole, replace(parts, steps=1), parts):
        train(run)
    assert losses_of(parts.out) == losses_of(whole.out)
    assert len(losses_of(whole.out)) == 2


# --- rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = _save(tmp_path_factory.mktemp("llava"), "Llava")
    for at in range(4):
        image(at).save(path / f"{at}.png")
    return path


def _sequences(config: TrainConfig) -> list[Sequence]:
    inputs = open_local(config)
    return list(inputs.stream(inputs.source, config.context_tokens, epochs=1))


def _batches(config: TrainConfig) -> list[dict[str, torch.Tensor]]:
    images = open_local(config).images
    return [collate([sequence], "none", config.context_tokens, images) for sequence in _sequences(config)]


def test_all_ways_to_give_images_are_the_same(folder: Path, tmp_path: Path) -> None:
    """Paths in content parts, paths in a column, bytes and structs of `datasets` in parquet, and a decoded image."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def same(data: Path) -> None:
        for found, wanted in zip(_batches(_config(folder, data)), expected, strict=True):
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[key], wanted[key]) for key in wanted)

    expected = _batches(_config(folder, write_rows(folder / "column.jsonl", ROWS)))
    assert "pixel_values" in expected[0] and "pixel_values" not in expected[3]
    inline = [_row(number, len(row["images"]), column=False) for number, row in enumerate(ROWS)]
    same(write_rows(folder / "inline.jsonl", inline))
    raw = [[(folder / name).read_bytes() for name in row["images"]] for row in ROWS]
    messages = [row["messages"] for row in ROWS]
    pq.write_table(pa.table({"messages": messages, "images": raw}), tmp_path / "bytes.parquet")
    same(tmp_path / "bytes.parquet")
    structs = [[{"bytes": x, "path": "a.png"} for x in row] for row in raw]
    pq.write_table(pa.table({"messages": messages, "images": structs}), tmp_path / "structs.parquet")
    same(tmp_path / "structs.parquet")
    decoded = document_of({"messages": messages[0], "images": [image(0)]}, "images", "text", "row 1")
    reference = json.loads(decoded.text)["images"][0]
    assert read_image(reference, "row 1").tobytes() == image(0).tobytes()


def test_images_beside_texts_come_before_the_first_turn(folder: Path) -> None:
    turns = [{"role": "user", "content": "the sea"}, {"role": "assistant", "content": "was calm"}]
    parts = [{"type": "image"}, {"type": "text", "text": "the sea"}]
    data = write_rows(folder / "texts.jsonl", [{"messages": turns, "images": ["1.png"]}])
    written = [{"role": "user", "content": parts}, turns[1]]
    other = write_rows(folder / "parts.jsonl", [{"messages": written, "images": "1.png"}])
    (found,), (wanted,) = (_batches(_config(folder, x)) for x in (data, other))
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("loss_on", ["assistant", "last", "all"])
def test_labels_do_not_depend_on_the_template_and_leave_out_placeholders(folder: Path, loss_on: str) -> None:
    data = write_rows(folder / "labels.jsonl", ROWS)
    (folder / "prefixes.jinja").write_text(PREFIXES)
    config = _config(folder, data, loss_on=loss_on)
    plain = _batches(replace(config, chat_template=folder / "prefixes.jinja"))
    marked = plain if loss_on == "last" else _batches(config)  # without marks, it needs a prompt for the generation
    for number, (a, b) in enumerate(zip(marked, plain, strict=True)):
        labels = a["labels"][0]
        assert torch.equal(labels, b["labels"][0])
        assert IMAGE not in labels
        ids = labels[labels >= 0].tolist()
        text = tokenizer().decode(ids)
        asked = " ".join(WORDS[(number * 3 + i) % len(WORDS)] for i in range(3 + number))
        turns = ["the sea was calm <e>", f"a ship {asked} <e>"]
        if loss_on == "all":
            wanted = int((a["input_ids"][0, 1:] != IMAGE).sum() - (a["attention_mask"] == 0).sum())
            assert int((labels[1:] >= 0).sum()) == wanted
        else:
            assert text == " ".join(turns if loss_on == "assistant" else turns[1:])


def test_a_chat_with_images_is_not_cut(folder: Path) -> None:
    """It would lose images that the model's inputs have."""
    config = _config(folder, write_rows(folder / "long.jsonl", [ROWS[1], ROWS[0]]), context=39)
    (sequence,) = _sequences(config)
    assert len(sequence.ids) == 39 and sequence.state["counts"] == {"truncated": 0, "left_out": 1}


def test_the_tower_is_trained_unless_it_is_frozen(folder: Path) -> None:
    """LoRA has no adapters there."""
    data = write_rows(folder / "frozen.jsonl", ROWS)
    for options, tower, language in (({}, True, True), ({"freeze": ("*vision_tower*",)}, False, True),
                                     ({"lora": 2}, False, True)):  # fmt: skip
        config = _config(folder, data, **options)
        inputs = open_local(config)
        model = tuned(model_origin(config, inputs.model_config).on_meta(), config.tuning, 0, images=True)
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        assert any("vision_tower" in name for name in trained) == tower
        assert any("language_model" in name for name in trained) == language


def test_bad_input_is_refused(folder: Path, tmp_path: Path) -> None:
    def refused(match: str, rows: list[dict[str, Any]], **changes: Any) -> None:
        with pytest.raises(LongspanError, match=match):
            _sequences(_config(folder, write_rows(folder / "bad.jsonl", rows), **changes))

    good, parts = ROWS[0], ROWS[0]["messages"]
    (folder / "broken.png").write_text("no pixels")
    bad = {**good, "images": ["broken.png"]}
    refused(
        r"bad\.jsonl, line 2: the image \S+/broken\.png cannot be read as an image: cannot identify.* \[LS505, see",
        [good, bad],
    )
    refused(
        r"line 1: the image \S+/none\.png cannot be read as an image: No such file", [{**good, "images": ["none.png"]}]
    )
    refused(r"line 1: the image cannot be read", [{**good, "images": ["data:image/png;base64,AAAA"]}])
    refused(r"line 1: the image http://a/b\.png is not downloaded", [{**good, "images": ["http://a/b.png"]}])
    refused(r"line 1: an image is int; give a path, or its bytes", [{**good, "images": [3]}])
    refused(r"line 1 has 2 `images` and 1 content parts", [{**good, "images": ["0.png", "1.png"]}])
    refused(r"line 1: image 1 of `messages` has no `path`, and there is no column", [{"messages": parts}])
    both = _row(0, 1, column=False) | {"images": ["0.png"]}
    refused(r"line 1 has images both in the column `images` and in `messages`", [both])
    said = [{"role": "user", "content": "the <image> sea"}, {"role": "assistant", "content": "was calm"}]
    refused(r"line 1 has 0 images, and 1 placeholders|line 1: the model's processor refuses it",
            [{"messages": said, "images": []}])  # fmt: skip
    refused(r"--pack best-fit: --data \S+ has images, whose chats are not packed; give --pack none", [good],
            pack="best-fit")  # fmt: skip
    text = [{"messages": [{"role": "user", "content": "the sea"}, said[1]]}]
    refused(
        r"line 2: message 1 holds image; images are read with --format images",
        [*text, {"messages": _row(0, 1, column=False)["messages"]}],
    )
    (tmp_path / "no.jinja").write_text(PREFIXES.replace("<image>", ""))
    refused(r"line 1 has 1 images, and 0 placeholders|line 1: the model's processor refuses it", [good],
            chat_template=tmp_path / "no.jinja")  # fmt: skip
    build("Llava").save_pretrained(tmp_path / "alone")
    processor().tokenizer.save_pretrained(tmp_path / "alone")
    refused(r"alone has no processor of images: .*; give the folder of one", [good], model=str(tmp_path / "alone"))
    write_config(tmp_path)
    refused(r"has images, and the model \(llama\) has no vision tower", [good], model=None,
            config=tmp_path / "config.json")  # fmt: skip
    only_text = write_rows(folder / "only_text.jsonl", text)
    with pytest.raises(LongspanError, match=r"--eval-data \S+, line 1 has images, and the data to train on has none"):
        evaluated = str(write_rows(folder / "eval.jsonl", [good]))
        check_inputs(_config(folder, only_text, eval_data=(evaluated,), out=tmp_path / "run"))


def _train_without(config: TrainConfig, file: Path) -> str:
    """Train, and return the error; the replica of rank 1 does not find a file that was there for the tokenising."""
    read = Tokenizer.pictures

    def pictures(rows: Tokenizer, *args: Any) -> Any:
        file.unlink(missing_ok=True)
        return read(rows, *args)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(LongspanError) as raised:
        if dist.get_rank() == 1:
            patch.setattr(Tokenizer, "pictures", pictures)
        train(config)
    return str(raised.value)


def test_an_image_that_disappears_stops_all_ranks(folder: Path, tmp_path: Path, pool2: RankPool) -> None:
    image(9).save(folder / "gone.png")
    rows = [ROWS[0], {**ROWS[2], "images": ["gone.png"]}]
    config = _config(
        folder, write_rows(folder / "gone.jsonl", rows), batch=2, micro_batch=1, data_degree=2, out=tmp_path
    )
    wanted = r"line 2: the image \S+gone\.png cannot be read as an image: No such file"
    for error in pool2.run(_train_without, config, folder / "gone.png", timeout=240):
        assert re.search(wanted, error)


def test_an_image_that_changes_is_refused(folder: Path) -> None:
    config = _config(folder, write_rows(folder / "gone.jsonl", ROWS))
    sequence = _sequences(config)[0]
    assert sequence.shown is not None
    other = dataclasses.replace(sequence.shown, text=sequence.shown.text.replace("the sea was calm", "a ship came"))
    with pytest.raises(LongspanError, match=r"line 1: an image has changed its size"):
        collate([dataclasses.replace(sequence, shown=other)], "none", 128, open_local(config).images)


def test_images_after_a_row_without_are_not_lost(tmp_path: Path) -> None:
    chats = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]} for _ in range(2)]
    path = write_rows(tmp_path / "rows.jsonl", [chats[0], chats[1] | {"images": ["x.png"]}])
    with pytest.raises(LongspanError, match="line 2 has `images`, and the first row has none"):
        list(DocumentSource(str(path)).documents(epochs=1))
    assert len(list(DocumentSource(str(path), format="chat").documents(epochs=1))) == 2


def test_lora_of_a_tower_that_sees_nothing_is_frozen() -> None:
    options = TuningSection(lora=2, lora_targets=("q_proj", "v_proj"))
    for images in (False, True):
        model = tuned(build("Llava"), options, 0, images=images)
        assert any("tower" in name for name, p in model.named_parameters() if p.requires_grad) == images
