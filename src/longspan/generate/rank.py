"""Generation on one rank: every rank makes the same calls, and the first one writes."""

from __future__ import annotations

import copy
import sys
import time
import zlib
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.comm.mesh import SequenceSharding, make_sharding
from longspan.compat.transformers_api import cache_name
from longspan.data import load_tokenizer
from longspan.generate.config import ModelFlags
from longspan.generate.fit import planned_cache
from longspan.generate.job import open_fitting_prompt
from longspan.generate.prompt import tokenizer_name
from longspan.generate.stream import Progress, TextStream
from longspan.hf.forward.kv_cache import ShardedCache
from longspan.hf.forward.kv_cache_files import INDEX
from longspan.hf.loading import load_sharded
from longspan.hf.support import decoder_layers
from longspan.ranks import agreement, launch
from longspan.ranks.launch import Stopped, StopRequest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from longspan.generate.config import GenerateConfig
    from longspan.generate.prompt import Prompt
    from longspan.ranks.heartbeat import Heartbeat

Flags = TypeVar("Flags", bound=ModelFlags)


def start(
    config: Flags, heartbeat: Heartbeat, opened: Prompt | None, open_text: Callable[[Flags], Prompt]
) -> tuple[Prompt, SequenceSharding, Any]:
    """Return the prompt, the sharding and the parallelized model. Collective.

    `opened` is the prompt opened by the launcher; None if each rank opens it by `open_text(config)`.
    """
    prompt = agreement.open_together(heartbeat, lambda: open_text(config) if opened is None else opened, _facts)
    config = prompt.flags
    heartbeat.at("loading", unlimited=True)
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
            kernel=config.kernel,
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


_MOST_TOKENS, _EVERY_US = 64, 1_000_000
"""The hosts agree on signals and compare their batches once in so many generated tokens, or microseconds."""


class Generation:
    """The generation of one rank. `prompt` is None if each rank opens it; the `first` rank writes.

    `report` has the results after the end; see docs/reference/json.md.
    """

    def __init__(self, config: GenerateConfig, heartbeat: Heartbeat, prompt: Prompt | None) -> None:
        self._heartbeat = heartbeat
        self.report: dict[str, Any] | None = None
        self.prompt, self.sp, self.model = start(config, heartbeat, prompt, open_fitting_prompt)
        self.config = config = self.prompt.flags
        self.first = self.sp.replica_rank == 0
        self._hosts = self.sp.host_group
        self._tokenizer = load_tokenizer(tokenizer_name(config))
        room = self.prompt.tokens + config.max_new_tokens
        self._cache = ShardedCache(
            self.model,
            room=room,
            dtype=config.cache,
            offload=config.cache_offload,
            latent=config.cache_latent,
            cuda_graph=config.cuda_graph,
        )
        self._progress = Progress(self.prompt.tokens, self.first)
        self._progress.follow(decoder_layers(self.model), config.chunk or self.prompt.tokens)
        self._forwards = self._reused = 0
        self._agreed = 0, 0.0  # tokens in the cache, and the time, when the hosts last agreed

    def run(self) -> dict[str, Any]:
        """Generate and write; return the report. If a signal reaches any rank, all stop after the same token."""
        settings, config = self.settings(), self.config
        ids = torch.from_numpy(self.prompt.ids)[None].to(self.sp.device)
        torch.manual_seed(config.seed)
        output = None if config.json or not self.first else sys.stdout
        stream = TextStream(self._tokenizer if self.first else None, output, config.out)
        stream.before = self._progress.clear
        began = time.perf_counter()
        with StopRequest(stops="stopping", late=("not ended", "the text stops here")) as stop:
            hook = self.model.register_forward_hook(lambda *_: self._forward_done(stop))
            try:
                if config.cache_dir is not None and self.prompt.text_tokens:
                    self._read_text(ids[:, : self.prompt.text_tokens], config.cache_dir / self.prompt.key)
                    # Some versions of transformers ignore what a cache holds when they read a prompt in chunks.
                    self._read(ids[:, self.prompt.text_tokens : -1])
                    settings.prefill_chunk_size = None
                self.model.generate(
                    ids, generation_config=settings, past_key_values=self._cache, streamer=stream, **self._pictures()
                )
                ends = settings.eos_token_id if isinstance(settings.eos_token_id, list) else [settings.eos_token_id]
                why = "the model" if stream.ids and stream.ids[-1] in ends else "--max-new-tokens"
                self._end(stream, began, why)
            except Stopped:
                self._end(stream, began, "a signal")
                raise
            finally:
                hook.remove()
                self._progress.clear()
                stream.close()
        assert self.report is not None
        return self.report

    def _pictures(self) -> dict[str, Tensor]:
        """Return the prompt's pictures on the device, with pixels in the dtype of the weights."""
        tensors = {name: torch.from_numpy(x).to(self.sp.device) for name, x in self.prompt.pictures.items()}
        return {name: x.to(self.model.dtype) if x.is_floating_point() else x for name, x in tensors.items()}

    def _read_text(self, ids: Tensor, folder: Path) -> None:
        """Fill the cache with the text: load an earlier run's cache, or run the model and save it. Collective."""
        saved = torch.tensor(int((folder / INDEX).is_file()))
        if self._hosts is not None:
            dist.all_reduce(saved, dist.ReduceOp.MIN, group=self._hosts)
        if saved:
            room = self.prompt.tokens + self.config.max_new_tokens
            self._cache = ShardedCache.load(folder, self.model, room, self.config.cache_offload, self.config.cuda_graph)
            self._reused = self._cache.get_seq_length()
            self._progress.at(self._reused)
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

    def _forward_done(self, stop: StopRequest) -> None:
        """After each forward, report progress and stop if a signal reached any rank."""
        held, prefill = self._cache.get_seq_length(), self.prompt.tokens
        if held <= prefill and self.sp.device.type == "cuda":
            torch.cuda.synchronize()  # kernels are launched ahead of the progress
        signum = stop.signum or 0
        if self._hosts is not None:
            due = held <= prefill or held >= self._cache.compare_from
            signum = self._agree(signum, held) if due else 0
        if held <= prefill:
            self._progress.at(held)
        self._forwards += 1
        self._heartbeat.at("prompt" if held < prefill else "new tokens", self._forwards)
        if signum:
            raise Stopped(signum)

    def _agree(self, signum: int, held: int) -> int:
        """Return the largest signal of any rank, and set after which token the hosts agree again."""
        before, began = self._agreed
        self._agreed = held, time.perf_counter()
        us = int(1e6 * (self._agreed[1] - began)) // max(1, held - before)
        most = torch.tensor([signum, us])
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._hosts)
        signum, us = most.tolist()
        generating = before >= self.prompt.tokens  # otherwise `us` is that of a prompt's token
        self._cache.compare_from = held + (min(_MOST_TOKENS, max(1, _EVERY_US // max(1, us))) if generating else 0)
        return signum

    def _end(self, stream: TextStream, began: float, why: str) -> None:
        held = self._cache.get_seq_length()
        every = torch.zeros(2, self.config.parallel.ranks, dtype=torch.int64)
        every[:, self.sp.replica_rank] = torch.tensor([self._cache.nbytes, self._cache.device_nbytes])
        if self._hosts is not None:
            dist.all_reduce(every, group=self._hosts)
        each, on_device = every.tolist()
        stream.close()
        new = len(stream.ids)
        prompt = min(held, self.prompt.tokens)
        first_s = (stream.times[0] if stream.times else time.perf_counter()) - began
        later_s = stream.times[-1] - stream.times[0] if new > 1 else 0.0
        self.report = {
            "text": stream.text,
            "ids": stream.ids,
            "prompt_tokens": self.prompt.tokens,
            "new_tokens": new,
            "ended_by": why,
            "first_token_s": first_s,
            "reused_tokens": self._reused,
            "prefill_tokens_per_s": (prompt - self._reused) / first_s,
            "tokens_per_s": (new - 1) / later_s if later_s else None,
            "cached_tokens": held,
            "cache_bytes": each,
            "state_bytes": self._cache.state_nbytes,
            **({} if self.config.cache_offload == "none" else {"device_cache_bytes": on_device}),
            **planned_cache(self.config, self.prompt.model_config, prompt, held - prompt),
        }
