"""Generation on one rank: every rank makes the same calls, and the first one writes."""

from __future__ import annotations

import contextlib
import copy
import sys
import time
import zlib
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm
from transformers import TextStreamer

from longspan.comm.mesh import SequenceSharding, make_sharding
from longspan.compat.transformers_api import cache_name
from longspan.generate.config import ModelFlags
from longspan.generate.job import open_fitting_prompt
from longspan.generate.prompt import tokenizer_name
from longspan.hf.forward.kv_cache import ShardedCache
from longspan.hf.forward.kv_cache_files import INDEX
from longspan.hf.loading import load_sharded
from longspan.hf.prompts import load_tokenizer
from longspan.ranks import agreement, launch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from longspan.generate.config import GenerateConfig
    from longspan.generate.prompt import Prompt
    from longspan.ranks.watch import Watch

Flags = TypeVar("Flags", bound=ModelFlags)


def start(
    config: Flags, watch: Watch, opened: Prompt | None, open_text: Callable[[Flags], Prompt]
) -> tuple[Prompt, SequenceSharding, Any]:
    """Return the prompt, the sharding and the parallelized model. Collective.

    `opened` is the prompt opened by the launcher; None if each rank opens it by `open_text(config)`.
    """
    prompt = agreement.open_together(lambda: open_text(config) if opened is None else opened, _facts)
    config = prompt.flags
    watch.at("loading", unlimited=True)
    if launch.is_first_rank():
        print(f"loading {config.model}", file=sys.stderr, flush=True)
    with launch.stdout_to_stderr():
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        sp = make_sharding(config.parallel)
        model = load_sharded(
            prompt.origin,
            sp,
            fsdp=config.fsdp,
            kernel=config.model.kernel,
            tensor_style=config.parallel.tensor_style,
            experts=config.parallel.experts,
        )
    return prompt, sp, model.eval()


def _facts(prompt: Prompt) -> dict[str, Any]:
    return {
        **agreement.settings(prompt.flags),
        **agreement.model_facts(prompt.model_config),
        "tokens of the text": f"{prompt.tokens} #{zlib.crc32(prompt.ids.tobytes()):08x}",
        **{name: f"{x.shape} #{zlib.crc32(x.tobytes()):08x}" for name, x in prompt.pictures.items()},
    }


_COMPARED_EVERY = 64
"""The ranks compare their batches once in so many generated tokens."""


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


class Generation:
    """The generation of one rank. `prompt` is None if each rank opens it; the `first` rank writes."""

    def __init__(self, config: GenerateConfig, watch: Watch, prompt: Prompt | None) -> None:
        self._watch = watch
        self.prompt, self.sp, self.model = start(config, watch, prompt, open_fitting_prompt)
        self.config = config = self.prompt.flags
        self.first = self.sp.replica_rank == 0
        self._tokenizer = load_tokenizer(tokenizer_name(config))
        room = self.prompt.tokens + config.max_new_tokens
        self._cache = ShardedCache(
            self.model,
            room=room,
            dtype=config.cache.dtype,
            offload=config.cache.offload,
            latent=config.cache.latent,
            cuda_graph=config.cuda_graph,
        )
        bar = {"desc": "reading", "unit": " tokens", "leave": False, "mininterval": 0.1 if sys.stderr.isatty() else 5.0}
        self._progress: Any = tqdm(total=self.prompt.tokens, disable=not self.first, **bar)
        self._forwards = self._reused = 0

    def run(self) -> dict[str, Any]:
        """Generate and write; return the report (docs/reference/json.md)."""
        settings, config = self.settings(), self.config
        ids = torch.from_numpy(self.prompt.ids)[None].to(self.sp.device)
        torch.manual_seed(config.seed)
        began = time.perf_counter()
        hook = self.model.register_forward_hook(lambda *_: self._forward_done())
        with contextlib.ExitStack() as files, self._progress:
            outputs = [] if config.json or not self.first else [sys.stdout]
            if config.out is not None and self.first:
                config.out.parent.mkdir(parents=True, exist_ok=True)
                outputs.append(files.enter_context(config.out.open("w", encoding="utf-8", newline="")))
            stream = TextStream(self._tokenizer, outputs)
            try:
                if config.cache_dir is not None and self.prompt.text_tokens:
                    self._read_text(ids[:, : self.prompt.text_tokens], config.cache_dir / self.prompt.key)
                    # Some versions of transformers ignore what a cache holds when they read a prompt in chunks.
                    self._read(ids[:, self.prompt.text_tokens : -1])
                    settings.prefill_chunk_size = None
                self.model.generate(
                    ids, generation_config=settings, past_key_values=self._cache, streamer=stream, **self._pictures()
                )
            finally:
                hook.remove()
                stream.end()  # what remains, after an error too
        if sys.stdout in outputs and not stream.text.endswith("\n"):
            print(flush=True)
        ends = settings.eos_token_id if isinstance(settings.eos_token_id, list) else [settings.eos_token_id]
        return self._report(stream, began, "the model" if stream.ids[-1] in ends else "--max-new-tokens")

    def _pictures(self) -> dict[str, Tensor]:
        """Return the prompt's pictures on the device, with pixels in the dtype of the weights."""
        tensors = {name: torch.from_numpy(x).to(self.sp.device) for name, x in self.prompt.pictures.items()}
        return {name: x.to(self.model.dtype) if x.is_floating_point() else x for name, x in tensors.items()}

    def _read_text(self, ids: Tensor, folder: Path) -> None:
        """Fill the cache with the text: load an earlier run's cache, or run the model and save it. Collective."""
        saved = torch.tensor(int((folder / INDEX).is_file()))
        if self.sp.host_group is not None:
            dist.all_reduce(saved, dist.ReduceOp.MIN, group=self.sp.host_group)
        if saved:
            room = self.prompt.tokens + self.config.max_new_tokens
            self._cache = ShardedCache.load(folder, self.model, room, self.config.cache.offload, self.config.cuda_graph)
            self._reused = self._cache.get_seq_length()
            self._progress.update(self._reused)
            return
        self._read(ids)
        self._cache.save(folder)

    def _read(self, ids: Tensor) -> None:
        """Run the model on more tokens of the prompt, chunk by chunk, to fill the cache. Collective."""
        name = cache_name(type(self.model).forward)
        with torch.no_grad():
            for chunk in ids.split(self.config.chunk, dim=1) if ids.shape[1] else ():
                self.model(input_ids=chunk, use_cache=True, logits_to_keep=1, **{name: self._cache})

    def settings(self) -> Any:
        """Return the model's generation config, updated by the flags."""
        config, settings = self.config, copy.deepcopy(self.model.generation_config)
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
        if config.temperature == 0:
            settings.update(do_sample=False, temperature=None, top_k=None, top_p=None)
        elif any(value is not None for value in (config.temperature, config.top_k, config.top_p)):
            settings.do_sample = True
        for name in ("temperature", "top_k", "top_p"):
            if getattr(config, name):
                setattr(settings, name, getattr(config, name))
        if config.top_k == 0:
            settings.top_k = 0
        if settings.eos_token_id is None:
            settings.eos_token_id = self._tokenizer.eos_token_id
        ends = settings.eos_token_id if isinstance(settings.eos_token_id, list) else [settings.eos_token_id]
        if self.prompt.end_of_turn not in (None, *ends):
            settings.eos_token_id = [*ends, self.prompt.end_of_turn]
        if settings.pad_token_id is None:
            settings.pad_token_id = self._tokenizer.pad_token_id
        return settings

    def _forward_done(self) -> None:
        """After each forward, tell the watch, and show progress of the prompt."""
        held, prompt = self._cache.get_seq_length(), self.prompt.tokens
        if held <= prompt:
            if self.sp.device.type == "cuda":
                torch.cuda.synchronize()  # kernels are launched ahead of the progress
            self._progress.update(held - self._progress.n)
            if held == prompt:
                self._progress.close()
        elif held >= self._cache.compare_from:
            self._cache.compare_from = held + _COMPARED_EVERY
        self._forwards += 1
        self._watch.at("prompt" if held < prompt else "new tokens", self._forwards)

    def _report(self, stream: TextStream, began: float, why: str) -> dict[str, Any]:
        held = self._cache.get_seq_length()
        every = torch.zeros(2, self.config.parallel.ranks, dtype=torch.int64)
        every[:, self.sp.replica_rank] = torch.tensor([self._cache.nbytes, self._cache.device_nbytes])
        if self.sp.host_group is not None:
            dist.all_reduce(every, group=self.sp.host_group)
        each, on_device = every.tolist()
        new, first_s = len(stream.ids), stream.times[0] - began
        later_s = stream.times[-1] - stream.times[0]
        return {
            "text": stream.text,
            "ids": stream.ids,
            "prompt_tokens": self.prompt.tokens,
            "new_tokens": new,
            "ended_by": why,
            "first_token_s": first_s,
            "reused_tokens": self._reused,
            "prefill_tokens_per_s": (self.prompt.tokens - self._reused) / first_s,
            "tokens_per_s": (new - 1) / later_s if new > 1 else None,
            "cached_tokens": held,
            "cache_bytes": each,
            "state_bytes": self._cache.state_nbytes,
            **({} if self.config.cache.offload == "none" else {"device_cache_bytes": on_device}),
        }
