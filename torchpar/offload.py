"""Offload by hand: moments rest in host memory, and are on the device only for their update.

    fetch        copy the moments of a chunk to the device, while the chunk before it is updated
    update       run the optimizer on the chunk
    send back    copy the moments of the chunk to the host

On a GPU the host memory is pinned, and the copies run on their own stream during the computation. On a CPU
the copies are made too, so that tests reach them.

ZeRO-Offload (arXiv 2101.06840) updates on the host. Here the device updates, so the numbers stay the same.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch


class StateOnHost(torch.optim.Optimizer):
    """A mix-in before an optimizer that updates each parameter alone. It moves the state: see `on_host`."""

    chunk_bytes = 64_000_000
    """Bytes of parameters in a chunk. The moments of two chunks are on the device at once."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.host_state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}  # by parameter and key, on the host
        device = self.param_groups[0]["params"][0].device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None  # a CPU has no streams

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """The optimizer's own step, one chunk of parameters after the other."""
        groups, chunks = self.param_groups, list(self._chunks())
        arrival = self._fetch(chunks[0][1]) if chunks else None
        for number, (options, parameters) in enumerate(chunks):
            if arrival:
                torch.cuda.current_stream().wait_event(arrival)
            # Copy the moments of the next chunk, while this one is updated.
            if number + 1 < len(chunks):
                arrival = self._fetch(chunks[number + 1][1])
            self.param_groups = [{**options, "params": parameters}]
            super().step()
            self._send_back(parameters)
        self.param_groups = groups
        if self._copies:
            self._copies.synchronize()  # readers of the state read host memory

    def _chunks(self) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
        """Parameters with gradients, `chunk_bytes` or more at a time, with the options of their group."""
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
        """Start copying the state of these parameters to the device. The event marks its arrival."""
        with torch.cuda.stream(self._copies):
            for parameter in parameters:
                for key, saved in self.host_state.get(parameter, {}).items():
                    fetched = torch.empty_like(saved, device=parameter.device, pin_memory=False)
                    self.state[parameter][key] = fetched.copy_(saved, non_blocking=True)
        return self._copies.record_event() if self._copies else None

    def _send_back(self, parameters: Sequence[torch.Tensor]) -> None:
        """Start copying the updated state of these parameters to the host."""
        if self._copies:
            self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            for parameter in parameters:
                on_host, state = self.host_state.setdefault(parameter, {}), self.state[parameter]
                for key, value in state.items():
                    if torch.is_tensor(value) and value.device == parameter.device:
                        if self._copies:
                            value.record_stream(self._copies)
                        if key not in on_host:
                            on_host[key] = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
                        state[key] = on_host[key].copy_(value, non_blocking=True)


def on_host(optimizer_cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The class of optimizers whose state rests in host memory."""
    return type(f"{optimizer_cls.__name__}OnHost", (StateOnHost, optimizer_cls), {})


def host_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The optimizer state in host memory, tensors of any shape."""
    inner = getattr(optimizer, "inner", optimizer)  # the optimizer that ShardedOptimizer wraps
    states = inner.host_state.values() if isinstance(inner, StateOnHost) else ()
    return [tensor for by_key in states for tensor in by_key.values()]


def device_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The optimizer state on the device: moments, shaped as the parameters, and step counts ()."""
    on_the_host = {id(tensor) for tensor in host_tensors(optimizer)}
    values = (value for entry in optimizer.state.values() for value in entry.values())
    return [value for value in values if torch.is_tensor(value) and id(value) not in on_the_host]
