"""Images and a video of a prompt, through the processor of a vision-language model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from longspan.core.errors import LongspanError
from longspan.data.images import read_image
from longspan.hf.pretrained import first_line, load_processor, takes_pictures, tokenizer_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from longspan.generate.config import GenerateConfig

Pictures = dict[str, "NDArray[Any]"]
"""Entries of the model's batch besides the ids, such as `pixel_values`."""


def encode(config: GenerateConfig, model_config: Any, text: str) -> tuple[NDArray[np.int64], Pictures]:
    """Return the ids of a user's message with the images and the video of a `GenerateConfig`, and their pictures.

    Raises:
        LongspanError: for a model or a folder that takes no pictures, and files that cannot be read.
    """
    if not takes_pictures(model_config):
        raise LongspanError(
            f"--model {config.model} ({model_config.model_type}) reads text only; leave out --image and --video, or "
            "give a vision-language model"
        )
    name = config.tokenizer or tokenizer_of("--model", config.model)
    processor = load_processor(name)
    if getattr(processor, "chat_template", None) is None:
        raise LongspanError(
            f"the processor of {name} has no chat template, which says where pictures are; give the folder of one that "
            "has it with --tokenizer"
        )
    images = [read_image(path, "--image") for path in config.image]
    options: dict[str, Any] = {} if not images else {"images": images}
    if config.video is not None:
        options |= _video(config.video, config.fps, processor)
    kinds = ["image"] * len(images) + ["video"] * (config.video is not None)
    message = {"role": "user", "content": [{"type": kind} for kind in kinds] + [{"type": "text", "text": text}]}
    try:
        written = processor.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        # Templates write the tokenizer's first token.
        made = processor(text=[written], return_tensors="pt", add_special_tokens=False, **options)
    except Exception as error:  # processors raise any kind
        raise LongspanError(
            f"the processor of --model {config.model} does not take these pictures: {first_line(error)}"
        ) from error
    from longspan.hf.vision import IMAGE_TYPES, PICTURE_KEYS

    taken = {*PICTURE_KEYS, IMAGE_TYPES.get(model_config.model_type)}
    pictures = {name: np.asarray(value) for name, value in made.items() if name in taken}
    return np.asarray(made["input_ids"][0], dtype=np.int64), pictures


def _video(path: Path, fps: float | None, processor: Any) -> dict[str, Any]:
    """Return the arguments of a processor for a folder of frames, in the order of their names, or a video file."""
    if getattr(processor, "video_processor", None) is None:
        raise LongspanError(f"--video {path}: the model's processor takes images only; give single frames by --image")
    if not path.is_dir():
        if fps is not None:
            raise LongspanError(f"--fps {fps:g} is that of a folder of frames; --video {path} is none: leave it out")
        try:
            frames, metadata = processor.video_processor.fetch_videos([str(path)])
        except Exception as error:  # of the library that decodes
            raise LongspanError(
                f"--video {path} cannot be read: {first_line(error)}; install a decoder (pip install av), or give a "
                "folder of frames"
            ) from error
        return {"videos": frames, "video_metadata": metadata}
    from transformers.video_utils import VideoMetadata

    files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    if not files:
        raise LongspanError(f"--video {path} holds no frames; give a folder of images, or a video file")
    frames = np.stack([np.asarray(read_image(file, "--video")) for file in files])
    n, rate = len(files), fps or 2.0
    metadata = VideoMetadata(total_num_frames=n, fps=rate, duration=n / rate, frames_indices=list(range(n)))
    return {"videos": [frames], "video_metadata": [metadata], "do_sample_frames": False}
