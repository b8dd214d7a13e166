"""Offload by hand: moments rest in the host's memory, and are on the device for their update only.

    fetch        the moments of some parameters, while those before them are updated
    update       these parameters, as the optimizer does
    send back    their moments

On a GPU the host's memory is pinned, and a stream of its own copies beside what the device computes. On a CPU
the same copies are made, so that it can be tried.

ZeRO-Offload (arXiv 2101.06840) updates on the host; here the device does, so that the numbers are the same.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch


class StateOnHost(torch.optim.Optimizer):
    """Put before an optimizer that treats parameters one by one, it moves their state: see `on_host`."""

    chunk_bytes = 64_000_000
    """Of parameters whose moments move together; two such chunks are on the device at once."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.homes: dict[torch.Tensor, dict[str, torch.Tensor]] = {}  # by parameter and key, on the host
        device = self.param_groups[0]["params"][0].device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None  # a CPU has no streams

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """The optimizer's own step, a chunk of parameters after the other."""
        groups, chunks = self.param_groups, list(self._chunks())
        arrival = self._fetch(chunks[0][1]) if chunks else None
        for number, (options, parameters) in enumerate(chunks):
            if arrival:
                torch.cuda.current_stream().wait_event(arrival)
            if number + 1 < len(chunks):
                arrival = self._fetch(chunks[number + 1][1])
            self.param_groups = [{**options, "params": parameters}]
            super().step()
            self._send_back(parameters)
        self.param_groups = groups
        if self._copies:
            self._copies.synchronize()  # who reads the state reads the host's memory

    def _chunks(self) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
        """Parameters that have a gradient, `chunk_bytes` or more at a time, with their group's options."""
        for group in self.param_groups:
            chunk: list[torch.Tensor] = []
            for parameter in group["params"]:
                if parameter.grad is not None:
                    chunk.append(parameter)
                if sum(member.nbytes for member in chunk) >= self.chunk_bytes:
                    yield group, chunk
                    chunk = []
            if chunk:
                yield group, chunk

    def _fetch(self, parameters: Sequence[torch.Tensor]) -> "torch.cuda.Event | None":
        """Begin to copy the state of these parameters to their device, where it is when the event happens."""
        with torch.cuda.stream(self._copies):
            for parameter in parameters:
                for key, home in self.homes.get(parameter, {}).items():
                    there = torch.empty_like(home, device=parameter.device, pin_memory=False)
                    self.state[parameter][key] = there.copy_(home, non_blocking=True)
        return self._copies.record_event() if self._copies else None

    def _send_back(self, parameters: Sequence[torch.Tensor]) -> None:
        """Begin to copy the state of these parameters, as it was updated, to the host."""
        if self._copies:
            self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            for parameter in parameters:
                homes, state = self.homes.setdefault(parameter, {}), self.state[parameter]
                for key, value in state.items():
                    if torch.is_tensor(value) and value.device == parameter.device:
                        if self._copies:
                            value.record_stream(self._copies)
                        if key not in homes:
                            homes[key] = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
                        state[key] = homes[key].copy_(value, non_blocking=True)


def on_host(optimizer_cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The class of optimizers whose state rests in the host's memory."""
    return type(f"{optimizer_cls.__name__}OnHost", (StateOnHost, optimizer_cls), {})


def host_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Tensors of an optimizer's state, any shapes, in host memory; of a wrapper's inner optimizer."""
    inner = getattr(optimizer, "inner", optimizer)
    of_parameters = inner.homes.values() if isinstance(inner, StateOnHost) else ()
    return [home for homes in of_parameters for home in homes.values()]
