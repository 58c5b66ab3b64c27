"""The text of a command as token ids, with its images and video, checked before any weight is loaded."""

from __future__ import annotations

import hashlib
import json
import sys
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from longspan.compat.reading import positions_of
from longspan.core.errors import LongspanError
from longspan.core.rope import settings_of
from longspan.hf.model.pretrained import (
    base_of,
    check_names,
    first_line,
    has_tokenizer,
    is_adapter,
    language_model_class,
    load_processor,
    read_model_config,
    takes_pictures,
    tokenizer_of,
)
from longspan.hf.model.prompts import BYTES, load_tokenizer, read_image, text_ids
from longspan.hf.weights.origin import Origin
from longspan.ranks import launch
from longspan.ranks.facts import model_facts, settings

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from longspan.generate.config import GenerateConfig, ModelFlags


@dataclass(frozen=True)
class Prompt:
    """A model's config and the tokens to run."""

    flags: Any  # of the command, with what `--weights auto` has chosen
    model_config: Any
    ids: NDArray[np.int64]  # [S]
    pictures: dict[str, NDArray[Any]] = field(default_factory=dict)  # the batch's other entries, such as `pixel_values`
    end_of_turn: int | None = None  # the token that ends an answer in the chat template, if the prompt is in it
    text_tokens: int = 0  # the first tokens, which do not depend on the question, with `--cache-dir`
    key: str = ""  # name of their cache in `--cache-dir`

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def origin(self) -> Origin:
        """The model's class, config and files."""
        import torch

        # The opened config, as its RoPE scaling may differ from the folder's.
        name, config = self.flags.model, self.model_config
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(self.flags.dtype, config.dtype or torch.float32)
        auto, base, adapter = language_model_class(config), base_of("--model", name), name if is_adapter(name) else None
        return Origin(auto, config, dtype, base, label=f"--model {name}", adapter=adapter)


def facts(prompt: Prompt) -> dict[str, Any]:
    """Return what must be equal on every rank."""
    arrays = {"tokens of the text": prompt.ids, **prompt.pictures}
    return {
        **settings(prompt.flags),
        **model_facts(prompt.model_config),
        **{name: f"{x.shape} #{zlib.crc32(x.tobytes()):08x}" for name, x in arrays.items()},
    }


def open_ids(config: ModelFlags, model_config: Any, ids: NDArray[np.int64], new: int = 0, **more: Any) -> Prompt:
    """Return a prompt of `ids`, which `new` tokens follow.

    Raise if there are no ids, or the model has no embedding for one, or too few positions.
    """
    size = model_config.get_text_config().vocab_size
    if not len(ids):
        raise LongspanError("the text has no tokens; give a longer one")
    if ids.max() >= size:
        raise LongspanError(
            f"tokenizer {tokenizer_name(config)} gives the id {ids.max()}, the model's vocabulary has {size} entries; "
            f"give the model's own with --tokenizer"
        )
    tokens, total = len(ids), len(ids) + new
    positions = positions_of(model_config)
    limit = positions.reach
    if limit is not None and total > limit:
        name = f"--model {config.model}"
        problem = f"the text has {tokens:,} tokens, {name} has {limit:,} positions (max_position_embeddings)"
        fix = "a shorter text"
        if new and tokens < limit:
            problem = (
                f"--max-new-tokens {new} and the {tokens:,} tokens of the prompt are more than the {limit:,} positions "
                f"of {name} (max_position_embeddings)"
            )
            fix = f"--max-new-tokens {limit - tokens} or less"
        values = positions.extended(total)
        if values is not None:
            fix += f", or extend its config.json: {settings_of(values)}"
        raise LongspanError(f"{problem}; give {fix}")
    return Prompt(config, model_config, ids, **more)


def open_prompt(config: GenerateConfig) -> Prompt:
    """Return the prompt of a `GenerateConfig`; no weights are loaded."""
    check_names(config.model, None, config.tokenizer)
    model_config = read_model_config("--model", config.model, 1)
    tokenizer = load_tokenizer(tokenizer_name(config))
    asked_alone = config.pictures and config.question and config.prompt is None and config.file is None
    optional = config.question is not None
    text = "" if asked_alone else read_text(config.prompt, config.file, "--prompt", optional=optional)
    if not (text or config.pictures or config.cache_dir is None):
        raise LongspanError(
            "--cache-dir saves the cache of what comes before the question, and there is nothing; give a text with "
            "--file, or leave it out"
        )
    chat = config.pictures or _in_template(config, tokenizer)

    def encoded(question: str | None) -> tuple[NDArray[np.int64], dict[str, NDArray[Any]]]:
        asked = f"{text.rstrip()}\n\n{question}" if text.strip() and question else question or text
        if config.pictures:
            return _with_pictures(config, model_config, asked)
        if not chat:
            return text_ids(tokenizer, asked), {}
        ids = tokenizer(_written(config, tokenizer, asked), add_special_tokens=False, verbose=False)["input_ids"]
        return np.asarray(ids, dtype=np.int64), {}

    ids, pictures = encoded(config.question)
    end = _end_of_turn(tokenizer) if chat else None
    opened = open_ids(config, model_config, ids, config.max_new_tokens, pictures=pictures, end_of_turn=end)
    if config.cache_dir is None:
        return opened
    other, _ = encoded(None if config.question is None else "?")
    length = min(len(ids) - 1, len(other))  # at least one token must be computed to generate the next one
    shared = int(np.append(ids[:length] != other[:length], True).argmax())
    return replace(opened, text_tokens=shared, key=_cache_key(config, model_config, ids[:shared]))


# --- the text


def tokenizer_name(config: ModelFlags) -> str:
    """Return the name or folder of the tokenizer."""
    name = config.tokenizer or tokenizer_of("--model", config.model)
    return name if config.tokenizer or has_tokenizer(name) else BYTES


def read_text(text: str | None, file: Path | None, flag: str, *, optional: bool = False) -> str:
    """Return `text` (the value of `flag`), or the text of a file or stdin; "" if an `optional` one is not given."""
    if text is not None:
        return text
    if file is None and (launch.is_started_rank() or sys.stdin is None or sys.stdin.isatty()):
        if optional:
            return ""
        raise LongspanError(f"there is no text; give {flag} TEXT or --file FILE, or pipe it in (not under torchrun)")
    where = "stdin" if file is None else f"--file {file}"
    try:
        decoded = (sys.stdin.buffer.read() if file is None else file.read_bytes()).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise LongspanError(f"{where} cannot be read: it is no UTF-8 text ({error}); save it as UTF-8") from error
    except OSError as error:
        raise LongspanError(f"{where} cannot be read: {error.strerror or error}") from error
    if not decoded and not (optional and file is None):
        raise LongspanError(f"{where} is empty; give a text")
    return decoded


def _cache_key(config: GenerateConfig, model_config: Any, ids: NDArray[np.int64]) -> str:
    """Return a digest of what the cache depends on: tokens, config, files, dtypes, version of transformers."""
    import transformers

    names = sorted({config.model, base_of("--model", config.model)})
    paths = [path for name in names for path in sorted(Path(name).glob("*"))]
    weights = [path for path in paths if path.suffix in (".safetensors", ".bin", ".json")]
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in weights]
    dtypes = config.dtype, config.cache.dtype
    known = [names, files, model_config.to_json_string(), *dtypes, transformers.__version__]
    return hashlib.sha256(json.dumps(known).encode() + ids.tobytes()).hexdigest()[:24]


# --- the chat template


def _in_template(config: GenerateConfig, tokenizer: Any) -> bool:
    """Return whether the text is sent in the tokenizer's chat template; raise if it must be and there is none."""
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if not has_template and config.template == "chat":
        raise LongspanError(
            f"--template chat: the tokenizer {tokenizer_name(config)} has no chat template; leave it out, or give the "
            "--tokenizer of a chat model"
        )
    return has_template and (config.template == "chat" or (config.template == "auto" and config.question is not None))


def _written(config: GenerateConfig, writer: Any, content: Any) -> str:
    """Return a user's message in the chat template of a tokenizer or processor."""
    try:
        written: str = writer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
    except Exception as error:  # of a template, which may raise anything
        name = config.tokenizer or tokenizer_of("--model", config.model)
        raise LongspanError(f"the chat template of {name} refuses the chat: {first_line(error)}") from error
    return written


def _end_of_turn(tokenizer: Any) -> int | None:
    """Return the special token that the chat template puts after an answer, if any.

    It may be missing in the model's generation_config.json, as in that of a base model that was trained on chats.
    """
    answer = "\u2603"
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
    try:
        written = tokenizer.apply_chat_template(chat, tokenize=False)
    except Exception:  # a template that wants other chats
        return None
    _, found, after = written.rpartition(answer)
    ids = tokenizer(after, add_special_tokens=False)["input_ids"] if found else []
    special = [token for token, added in tokenizer.added_tokens_decoder.items() if added.special]
    return ids[0] if ids and ids[0] in special else None


# --- images and a video


def _with_pictures(config: GenerateConfig, model_config: Any, text: str) -> tuple[NDArray[np.int64], dict[str, Any]]:
    """Return the ids of a user's message with the images and the video of a `GenerateConfig`, and their pictures."""
    if not takes_pictures(model_config):
        raise LongspanError(
            f"--model {config.model} ({model_config.model_type}) reads text only; leave out --image and --video, "
            "or give a vision-language model"
        )
    name = config.tokenizer or tokenizer_of("--model", config.model)
    processor = load_processor(name)
    if getattr(processor, "chat_template", None) is None:
        raise LongspanError(
            f"the processor of {name} has no chat template, which says where pictures are; give the folder of one that "
            "has it with --tokenizer"
        )
    options: dict[str, Any] = {"images": [read_image(path, "--image") for path in config.image]} if config.image else {}
    if config.video is not None:
        options |= _video(config.video, config.fps, processor)
    kinds = ["image"] * len(config.image) + ["video"] * (config.video is not None)
    written = _written(config, processor, [*({"type": kind} for kind in kinds), {"type": "text", "text": text}])
    try:
        # Templates write the tokenizer's first token.
        made = processor(text=[written], return_tensors="pt", add_special_tokens=False, **options)
    except Exception as error:  # processors raise any kind
        raise LongspanError(
            f"the processor of --model {config.model} does not take these pictures: {first_line(error)}"
        ) from error
    from longspan.hf.model.vision import IMAGE_TYPES, PICTURE_KEYS

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
