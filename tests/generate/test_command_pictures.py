"""`longspan generate` with images and videos: the same tokens as one process, and clear errors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, GenerationConfig, LlamaConfig, LlamaForCausalLM

from longspan.core.errors import LongspanError
from longspan.generate.config import GenerateConfig
from longspan.generate.job import open_fitting_prompt
from longspan.generate.prompt import _video
from tests.flags import make
from tests.generate.generating import run_generate
from tests.hf.pictures import build
from tests.models import BASE
from tests.pool import RankPool
from tests.train.chats import PICTURE_CHAT, image, processor, tokenizer

NEW = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaVA, whose tokens depend on the images, with its processor, and two images."""
    path = tmp_path_factory.mktemp("llava")
    model = build("Llava")
    with torch.no_grad():
        for p in model.model.multi_modal_projector.parameters():
            p.mul_(8)
    model.save_pretrained(path)
    processor().save_pretrained(path)
    for name, at in (("a", 1), ("b", 2)):
        image(at).save(path / f"{name}.png")
    return path


def _config(folder: Path, **more: Any) -> GenerateConfig:
    base = {"model": str(folder), "max_new_tokens": NEW, "json": True, "temperature": 0.0, "question": "the sea was"}
    return make(GenerateConfig, **{**base, **more})


def _plain(folder: Path, images: list[Any], text: str, **changes: Any) -> list[int]:
    content = [*({"type": "image", "image": x} for x in images), {"type": "text", "text": text}]
    made = AutoProcessor.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": content}], tokenize=True, return_dict=True, return_tensors="pt",
        add_generation_prompt=True,
    )  # fmt: skip
    model = AutoModelForImageTextToText.from_pretrained(folder)
    settings = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=1, pad_token_id=0)
    found: list[int] = model.generate(**{**made, **changes}, generation_config=settings)[
        0, made["input_ids"].shape[1] :
    ].tolist()
    return found


def test_tokens_are_those_of_one_process(pool2: RankPool, folder: Path) -> None:
    """Also of a prompt that is read in chunks, and of a text without pictures."""
    images = (folder / "a.png", folder / "b.png")
    expected = _plain(folder, [image(1), image(2)], "the sea was")
    assert expected != _plain(folder, [image(2), image(3)], "the sea was")
    for mesh in ({"ring": 2, "weights": "sharded", "prefill_chunk": 16}, {"ulysses": 2, "weights": "replicated"}):
        for report in pool2.run(run_generate, _config(folder, image=images, **mesh)):
            assert report["ids"] == expected and report["prompt_tokens"] > 32
    text = _config(folder, prompt="a ship came", question=None, ring=2)
    assert len(pool2.run(run_generate, text)[0]["ids"]) <= NEW


def test_tokens_of_an_image_see_each_other(pool2: RankPool, tmp_path: Path) -> None:
    """Gemma-3's, as the token types of its processor say."""
    from transformers import Gemma3ImageProcessorPil, Gemma3Processor, PreTrainedTokenizerFast

    names = {"image_token": "<image>", "boi_token": "<unk>", "eoi_token": "<unk>"}
    words = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer().backend_tokenizer, pad_token="<pad>", eos_token="<e>", unk_token="<unk>",
        extra_special_tokens=names,
    )  # fmt: skip
    made = Gemma3Processor(
        Gemma3ImageProcessorPil(size={"height": 16, "width": 16}), words, image_seq_length=16,
        chat_template=PICTURE_CHAT.replace("<image>", "<unk>"),
    )  # fmt: skip
    made.save_pretrained(tmp_path)
    build("Gemma3", seed=1).save_pretrained(tmp_path)
    for name, at in (("a", 1), ("b", 2)):
        image(at).save(tmp_path / f"{name}.png")
    expected = _plain(tmp_path, [image(1), image(2)], "the sea was")
    assert expected != _plain(tmp_path, [image(1), image(2)], "the sea was", token_type_ids=None)
    config = _config(tmp_path, image=(tmp_path / "a.png", tmp_path / "b.png"), ring=2, weights="replicated")
    for report in pool2.run(run_generate, config):
        assert report["ids"] == expected


def test_text_and_question_follow_the_pictures(folder: Path) -> None:
    asked = open_fitting_prompt(_config(folder, image=(folder / "a.png",), prompt="a ship came", question="with sails"))
    alone = open_fitting_prompt(_config(folder, image=(folder / "a.png",), question="a ship came with sails"))
    assert asked.ids.tolist() == alone.ids.tolist()
    assert asked.pictures["pixel_values"].shape == (1, 3, 16, 16)


def test_a_folder_of_frames_is_a_video(tmp_path: Path) -> None:
    for at in (2, 0, 1):
        image(at).save(tmp_path / f"{at:03}.png")
    with_videos = SimpleNamespace(video_processor=object())
    made = _video(tmp_path, 4.0, with_videos)
    assert np.array_equal(made["videos"][0], np.stack([np.asarray(image(at)) for at in range(3)]))
    (metadata,) = made["video_metadata"]
    assert not made["do_sample_frames"]
    assert (metadata.total_num_frames, metadata.fps, metadata.duration) == (3, 4.0, 0.75)


def test_bad_input_is_refused(folder: Path, tmp_path: Path) -> None:
    picture = (folder / "a.png",)

    def refused(match: str, **changes: Any) -> None:
        with pytest.raises(LongspanError, match=match):
            config = _config(folder, **{"image": picture, **changes})
            config.check()
            open_fitting_prompt(config)

    (tmp_path / "bad.png").write_text("no pixels")
    refused(r"--image \S+/bad\.png cannot be read as an image: cannot identify", image=(tmp_path / "bad.png",))
    refused(r"--image \S+/none\.png cannot be read as an image: No such file", image=(tmp_path / "none.png",))
    refused(r"--video \S+: the model's processor takes images only", image=(), video=tmp_path)
    refused(r"--cache-dir saves the cache of a text alone", cache_dir=tmp_path / "cache")
    refused(r"--fps must be above 0, got 0", fps=0)
    refused(r"--fps 2 is that of --video, which is missing", fps=2)
    refused(r"--template none, but the chat template says where", template="none")
    build("Llava").save_pretrained(tmp_path / "alone")
    processor().tokenizer.save_pretrained(tmp_path / "alone")
    refused(r"alone has no processor of images: .*; give the folder of one with", model=str(tmp_path / "alone"))
    text = LlamaConfig(**BASE)
    torch.manual_seed(0)
    LlamaForCausalLM(text).save_pretrained(tmp_path / "text")
    refused(r"--model \S+/text \(llama\) reads text only; leave out --image and --video", model=str(tmp_path / "text"))
    (tmp_path / "frames").mkdir()

    def no_decoder(files: list[str]) -> Any:
        raise ImportError(f"nothing decodes {len(files)} file")

    with_videos = SimpleNamespace(video_processor=SimpleNamespace(fetch_videos=no_decoder))
    with pytest.raises(LongspanError, match=r"--video \S+/frames holds no frames"):
        _video(tmp_path / "frames", 2.0, with_videos)
    with pytest.raises(LongspanError, match=r"--fps 2 is that of a folder of frames; --video \S+/a\.mp4 is none"):
        _video(tmp_path / "a.mp4", 2.0, with_videos)
    with pytest.raises(LongspanError, match=r"--video \S+/a\.mp4 cannot be read: nothing decodes 1 file; install a"):
        _video(tmp_path / "a.mp4", None, with_videos)
