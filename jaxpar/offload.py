"""Offload: the moments of the optimizer stay in the host's memory between two updates."""

from collections.abc import Callable
from typing import Any

import jax

HOST = "pinned_host"
"""XLA's name of the host's memory. On a CPU it is the device's memory, and XLA leaves the copies out."""


def offload_moments(step: Callable[..., Any], on_device: Any) -> Callable[..., Any]:
    """A step that copies the moments to the devices and back. XLA chooses when it copies.

    `on_device` has the shardings of a moment while it is on the devices, a tree like the parameters.
    """
    on_host = jax.tree.map(lambda sharding: sharding.with_memory_kind(HOST), on_device)

    def copy(moments: dict[str, Any], shardings: Any) -> dict[str, Any]:
        return jax.device_put(moments, dict.fromkeys(moments, shardings))

    def offloaded_step(params: Any, moments: Any, batch: Any, scalars: Any) -> Any:
        params, moments, *rest = step(params, copy(moments, on_device), batch, scalars)
        return params, copy(moments, on_host), *rest

    return offloaded_step
