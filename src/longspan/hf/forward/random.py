"""The stages for layers that draw random numbers in training: dropout outside attention, and NEFTune's noise."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from longspan.comm.mesh import SequenceSharding
from longspan.core.errors import LongspanError
from longspan.hf.forward.stage import ForwardCall, Stage


class RandomStream(Stage):
    """Let each rank of a sequence group draw random numbers of its own in a training forward, for its own tokens.

    The stream depends on the state of the CPU's generator before the forward and on the rank. Between forwards the
    generators stay as the caller seeded them: equal on the ranks of a group, as samplers and losses need that draw for
    the whole batch.
    """

    def __init__(self, sp: SequenceSharding) -> None:
        self.sp = sp
        self.outside: list[Tensor] | None = None  # the generators' states before this forward
        # A fake GPU, on which memory is counted without one, has no generator.
        real = sp.device.type != "cpu" and torch.get_device_module(sp.device.type).is_initialized()
        self.devices = [sp.device] if real else []

    def before(self, call: ForwardCall) -> None:
        if not call.model.training or self.sp.size == 1:
            return
        self.outside = self._states()
        state = bytes(self.outside[0].numpy()) + self.sp.rank.to_bytes(4)
        seed = int.from_bytes(hashlib.blake2b(state, digest_size=8).digest())
        torch.default_generator.manual_seed(seed)
        for device in self.devices:
            torch.get_device_module(device.type).manual_seed(seed)
        self.seeded = self._states()

    def after(self, call: ForwardCall, output: Any) -> Any:
        if self.outside is None:
            return output
        drew = any(not torch.equal(a, b) for a, b in zip(self.seeded, self._states(), strict=True))
        self.reset()
        if drew:  # the next forward draws others
            torch.empty((), dtype=torch.int64).random_()
        return output

    def reset(self) -> None:
        """Restore the generators, also after a forward that raised."""
        if self.outside is not None:
            cpu, *others = self.outside
            torch.set_rng_state(cpu)
            for device, state in zip(self.devices, others, strict=True):
                torch.get_device_module(device.type).set_rng_state(state, device)
            self.outside = None

    def _states(self) -> list[Tensor]:
        others = [torch.get_device_module(device.type).get_rng_state(device) for device in self.devices]
        return [torch.get_rng_state(), *others]


class WholeNoise(Stage):
    """Scale NEFTune's noise by the tokens of the whole sequence: alpha / sqrt(tokens x hidden).

    transformers' hook on the embedding sees this rank's tokens, so it gets a smaller alpha during the forward.
    """

    def __init__(self, sp: SequenceSharding) -> None:
        self.sp = sp
        self.scaled: tuple[Any, float] | None = None  # the embedding, and its alpha

    def check(self, call: ForwardCall) -> None:
        alpha = getattr(call.model.get_input_embeddings(), "neftune_noise_alpha", None)
        if alpha is not None and call.model.training and self.sp.tensor_size > 1:
            raise LongspanError(
                f"NEFTune's noise (neftune_noise_alpha={alpha}) would differ between the ranks of "
                f"`tensor={self.sp.tensor_size}`; use tensor=1, or train without noise"
            )

    def before(self, call: ForwardCall) -> None:
        embedding: Any = call.model.get_input_embeddings()
        alpha = getattr(embedding, "neftune_noise_alpha", None)
        if alpha is None or not call.model.training:
            return
        whole = call.info.length if call.packed is None else call.packed.at.shape[1]
        self.scaled = embedding, alpha
        embedding.neftune_noise_alpha = alpha * (call.info.local_length / (call.options.noise_tokens or whole)) ** 0.5

    def reset(self) -> None:
        if self.scaled is not None:
            embedding, alpha = self.scaled
            embedding.neftune_noise_alpha, self.scaled = alpha, None
