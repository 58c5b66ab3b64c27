"""The state of a forward that its recomputation in the backward needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class ForwardState:
    """The autocast state now and, if the forward draws random numbers, the state of the generators."""

    def __init__(self, device: torch.device, *, draws: bool) -> None:
        self._device, kind = device, device.type
        self._autocast = torch.amp.is_autocast_available(kind)
        if self._autocast:
            self._enabled, self._dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self._host_rng = torch.get_rng_state() if draws else None
        self._device_rng = torch.get_device_module(device).get_rng_state(device) if draws and kind != "cpu" else None

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the state for the body."""
        with contextlib.ExitStack() as stack:
            if self._host_rng is not None:
                devices = [] if self._device_rng is None else [self._device]
                kind = self._device.type if devices else "cuda"
                stack.enter_context(torch.random.fork_rng(devices, device_type=kind))
                torch.set_rng_state(self._host_rng)
            if self._device_rng is not None:
                torch.get_device_module(self._device).set_rng_state(self._device_rng, self._device)
            if self._autocast:
                stack.enter_context(
                    torch.autocast(self._device.type, dtype=self._dtype, enabled=self._enabled, cache_enabled=False)
                )
            yield
