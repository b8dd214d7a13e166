"""Offload: moments rest in the host's memory, and are on the devices within a step only.

    at rest     pinned_host, split as ever
    in a step   device_put to the device, the step as it is, device_put back

When the copies run, between the step's other work, is for XLA to decide. On a CPU host and device are one
memory: XLA knows the two kinds, and leaves the copies out.
"""

from dataclasses import replace
from typing import Any

import jax

from jaxpar.optimizer import Moments
from jaxpar.step import ShardedStep

HOST = "pinned_host"


def with_moments_on_host(sharded: ShardedStep) -> ShardedStep:
    """The step with moments read from the host's memory and written back there."""
    at_rest = jax.tree.map(lambda sharding: sharding.with_memory_kind(HOST), sharded.moments)

    def moved(moments: Moments, where: Any) -> Moments:
        return jax.device_put(moments, dict.fromkeys(moments, where))

    def step(params: Any, opt_state: Moments, batch: Any, scalars: Any) -> Any:
        params, opt_state, *rest = sharded.step(params, moved(opt_state, sharded.moments), batch, scalars)
        return params, moved(opt_state, at_rest), *rest

    return replace(sharded, step=step, moments_at_rest=at_rest)


def is_on_host(array: Any) -> bool:
    """Whether an array, or a shape with a sharding, is in the host's memory."""
    return array.sharding.memory_kind == HOST
