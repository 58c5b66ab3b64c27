"""Generation on one rank: every rank makes the same calls, and the first one writes."""

from __future__ import annotations

import contextlib
import copy
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import TextStreamer

from longspan.comm.agree import gather_objects, open_together
from longspan.comm.mesh import SequenceSharding
from longspan.generate.prompt import Prompt, facts, tokenizer_name
from longspan.hf.cache.files import INDEX
from longspan.hf.cache.kv_cache import ShardedCache
from longspan.hf.loading import load_sharded
from longspan.hf.model.pretrained import without_progress_bars
from longspan.hf.model.prompts import load_tokenizer
from longspan.ranks import launch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from longspan.ranks.watch import Watch

_COMPARED_EVERY = 64
"""Generated tokens between two checks that all ranks have the same batch."""


def load(opened: Callable[[], Prompt], watch: Watch) -> tuple[Prompt, SequenceSharding, Any]:
    """Return the prompt, the same on every rank, its sharding and its parallelized model. Collective."""
    prompt = open_together(opened, facts)
    config = prompt.flags
    watch.at("loading", unlimited=True)
    if launch.is_first_rank():
        print(f"loading {config.model}", file=sys.stderr, flush=True)
    with launch.stdout_to_stderr(), without_progress_bars():
        sp = SequenceSharding.of(config.parallel)
        model = load_sharded(
            prompt.origin,
            sp,
            fsdp=config.fsdp,
            kernel=config.kernel,
            tensor_style=config.parallel.tensor_style,
            experts=config.parallel.experts,
        )
    return prompt, sp, model.eval()


class TextStream(TextStreamer):  # type: ignore[misc]
    """Write the text to files as it is generated. `ids` are the new tokens, `times` those of the first and the last."""

    def __init__(self, tokenizer: Any, files: Sequence[TextIO]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        self.ids, self.text, self.times = list[int](), "", list[float]()
        self._files = files

    def put(self, value: Tensor) -> None:
        """Take the ids of the prompt, then those of each new token."""
        if not self.next_tokens_are_prompt:
            self.ids += value.flatten().tolist()
            self.times = [*self.times[:1], time.perf_counter()]
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Write whole words."""
        self.text += text
        for file in self._files:
            file.write(text)
            file.flush()


def generate(opened: Callable[[], Prompt], watch: Watch) -> dict[str, Any]:
    """Generate on this rank; return the report (docs/reference/json.md). Collective. The first rank writes the text."""
    prompt, sp, model = load(opened, watch)
    config, first = prompt.flags, sp.model_rank == 0
    tokenizer = load_tokenizer(tokenizer_name(config))
    settings = _settings(prompt, model.generation_config, tokenizer)
    ids = torch.from_numpy(prompt.ids)[None].to(sp.device)
    batch = {name: torch.from_numpy(x).to(sp.device) for name, x in prompt.pictures.items()}
    batch = {name: x.to(model.dtype) if x.is_floating_point() else x for name, x in batch.items()}
    torch.manual_seed(config.seed)
    began, cache = time.perf_counter(), _new_cache(prompt, sp, model)
    reused = cache.get_seq_length()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_progress(prompt, sp, model, cache, watch))
        files = [] if config.json or not first else [sys.stdout]
        if config.out is not None and first:
            config.out.parent.mkdir(parents=True, exist_ok=True)
            files.append(stack.enter_context(config.out.open("w", encoding="utf-8", newline="")))
        stream = TextStream(tokenizer, files)
        stack.callback(stream.end)  # writes what remains, after an error too
        if config.cache_dir is not None and prompt.text_tokens:
            if not reused:
                _read(model, cache, ids[:, : prompt.text_tokens], config.chunk)
                cache.save(config.cache_dir / prompt.key)
            # Some versions of transformers ignore what a cache holds when they read a prompt in chunks.
            _read(model, cache, ids[:, prompt.text_tokens : -1], config.chunk)
            settings.prefill_chunk_size = None
        model.generate(ids, generation_config=settings, cache=cache, streamer=stream, **batch)
    if sys.stdout in files and not stream.text.endswith("\n"):
        print(flush=True)
    new, (first_s, last_s) = len(stream.ids), (stream.times[0] - began, stream.times[-1] - began)
    cache_bytes, on_device = zip(*gather_objects((cache.nbytes, cache.device_nbytes), sp.host_group), strict=True)
    return {
        "text": stream.text,
        "ids": stream.ids,
        "prompt_tokens": prompt.tokens,
        "new_tokens": new,
        "ended_by": "the model" if stream.ids[-1] in settings.eos_token_id else "--max-new-tokens",
        "first_token_s": first_s,
        "reused_tokens": reused,
        "prefill_tokens_per_s": (prompt.tokens - reused) / first_s,
        "tokens_per_s": (new - 1) / (last_s - first_s) if new > 1 else None,
        "cached_tokens": cache.get_seq_length(),
        "cache_bytes": list(cache_bytes),
        "state_bytes": cache.state_nbytes,
        **({} if config.cache.offload == "none" else {"device_cache_bytes": list(on_device)}),
    }


def _settings(prompt: Prompt, generation_config: Any, tokenizer: Any) -> Any:
    """Return the model's generation config, updated by the flags."""
    config, settings = prompt.flags, copy.deepcopy(generation_config)
    settings.update(
        max_new_tokens=config.max_new_tokens,
        max_length=None,
        min_length=0,
        num_beams=1,
        num_return_sequences=1,
        cache_implementation=None,
        use_cache=True,
        return_dict_in_generate=False,
        # By default the model chooses: no chunk may begin within an image whose tokens see each other.
        prefill_chunk_size=config.prefill_chunk if config.pictures else config.chunk,
    )
    drawn = {name: getattr(config, name) for name in ("temperature", "top_k", "top_p")}
    if config.temperature == 0:
        settings.update(do_sample=False, **dict.fromkeys(drawn))
    elif given := {name: value for name, value in drawn.items() if value is not None}:
        settings.update(do_sample=True, **given)
    ends = tokenizer.eos_token_id if settings.eos_token_id is None else settings.eos_token_id
    ends = list(ends) if isinstance(ends, list) else [ends]
    settings.eos_token_id = ends + ([] if prompt.end_of_turn in (None, *ends) else [prompt.end_of_turn])
    if settings.pad_token_id is None:
        settings.pad_token_id = tokenizer.pad_token_id
    return settings


def _new_cache(prompt: Prompt, sp: SequenceSharding, model: Any) -> ShardedCache:
    """Return the KV cache that an earlier run has saved of the text, if every rank sees it, else an empty one."""
    config, room = prompt.flags, prompt.tokens + prompt.flags.max_new_tokens
    if prompt.text_tokens:
        folder = config.cache_dir / prompt.key
        if all(gather_objects((folder / INDEX).is_file(), sp.host_group)):
            return ShardedCache.load(folder, model, room, config.cache.offload, config.cuda_graph)
    options = {"offload": config.cache.offload, "latent": config.cache.latent, "cuda_graph": config.cuda_graph}
    return ShardedCache(model, room=room, dtype=config.cache.dtype, **options)


def _read(model: Any, cache: ShardedCache, ids: Tensor, chunk: int) -> None:
    """Run the model on more tokens of the prompt, chunk by chunk, to fill the cache. Collective."""
    with torch.no_grad():
        for part in ids.split(chunk, dim=1) if ids.shape[1] else ():
            model(input_ids=part, use_cache=True, logits_to_keep=1, cache=cache)


@contextlib.contextmanager
def _progress(prompt: Prompt, sp: SequenceSharding, model: Any, cache: ShardedCache, watch: Watch) -> Any:
    """After each forward tell the watch, and show how much of the prompt the model has read."""
    forwards, disable = 0, sp.model_rank != 0
    shown = {"unit": " tokens", "leave": False, "mininterval": 0.1 if sys.stderr.isatty() else 5.0}
    bar = tqdm(total=prompt.tokens, desc="reading", initial=cache.get_seq_length(), disable=disable, **shown)

    def after(*_: Any) -> None:
        nonlocal forwards
        held, forwards = cache.get_seq_length(), forwards + 1
        if held <= prompt.tokens:
            if sp.device.type == "cuda":
                torch.cuda.synchronize()  # kernels are launched ahead of the progress
            bar.update(held - bar.n)
            if held == prompt.tokens:
                bar.close()
        elif held >= cache.compare_from:
            cache.compare_from = held + _COMPARED_EVERY
        watch.at("prompt" if held < prompt.tokens else "new tokens", forwards)

    hook = model.register_forward_hook(after)
    try:
        with bar:
            yield
    finally:
        hook.remove()
