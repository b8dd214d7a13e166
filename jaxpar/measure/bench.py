"""Time collectives between devices.

The CPU devices of one process are threads that share memory: a message is a copy, and a small one takes as
long as a jitted call. Between processes JAX sends with gloo. The host waits for each call.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from compare.side.collective_bench import (
    TIMES,
    CollectiveCase,
    CollectiveRequest,
    CollectiveRow,
    CollectiveTimes,
    elements,
    expected,
    make_row,
    measure,
    sent,
)
from compare.spec.axes import DP_REPLICATE
from compare.spec.experiment import Layout
from compare.system.facts import versions
from compare.system.json_files import write_json
from jaxpar import PACKAGES
from jaxpar.comm import collectives, hosts
from jaxpar.comm.mesh import device_kind, make_mesh
from jaxpar.measure.memory import threads

AXIS = DP_REPLICATE  # any would do: the mesh has no other of more than one device


def run_bench(request: CollectiveRequest, folder: Path, *, at: Callable[[int, str], None]) -> None:
    """Time collectives, and leave `folder/collectives.json`. Raises MissingDevicesError: too few devices."""
    mesh, rows = make_mesh(Layout(dp_replicate=request.ranks), platform=request.platform), []
    for number, case in enumerate(request.cases):
        for way in request.implementations:
            at(number, "setting up")  # it compiles first
            rows.append(time_case(way, case, mesh, request))
    devices = list(mesh.devices.flat)
    times = CollectiveTimes(
        rows=rows,
        device_kind=device_kind(devices[0]),
        versions=versions(PACKAGES),
        threads=threads(devices),
        hosts=hosts.hosts_of(devices),
    )
    if jax.process_index() == 0:
        write_json(folder / TIMES, times)


def time_case(way: str, case: CollectiveCase, mesh: Mesh, request: CollectiveRequest) -> CollectiveRow:
    """Time one collective of one size, then do it once more and look at what it gave on each device."""
    ranks, devices = request.ranks, list(mesh.devices.flat)
    count = elements(case.kind, case.size, ranks)
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    local = [rank for rank, device in enumerate(devices) if device.process_index == jax.process_index()]
    numbers = [sent(case.kind, rank, ranks=ranks, count=count) for rank in local]
    shards = [jax.device_put(x, devices[rank]) for rank, x in zip(local, numbers, strict=True)]
    shape = (len(numbers[0]) * ranks,)
    given = jax.make_array_from_single_device_arrays(shape, sharding, shards)
    collective = collectives.per_device(
        partial(OPERATIONS[case.kind], platform=request.platform),
        mesh=mesh,
        in_specs=sharding.spec,
        out_specs=sharding.spec,
    )
    compiled = jax.jit(collective).lower(given).compile()
    hosts.barrier("compiled")
    call = lambda: jax.block_until_ready(compiled(given))  # noqa: E731
    slowest = lambda value: max(hosts.all_gather_numbers([value]))  # noqa: E731
    seconds = measure(call, wait=lambda: None, slowest=slowest, row_s=request.row_s)
    results = {devices.index(shard.device): np.asarray(shard.data) for shard in call().addressable_shards}
    here = sum(
        int((result != expected(case.kind, rank, ranks=ranks, count=count)).sum())
        for rank, result in results.items()
    )
    wrong = int(sum(hosts.all_gather_numbers([here])))
    return make_row(way, case, ranks=ranks, seconds=seconds, wrong=wrong)


def _broadcast(x: jax.Array, *, platform: str) -> jax.Array:
    if platform == "gpu":
        return lax.pbroadcast(x, AXIS, 0)
    return collectives.all_reduce(jnp.where(lax.axis_index(AXIS) == 0, x, 0), AXIS)


OPERATIONS: dict[str, Callable[..., jax.Array]] = {
    "all_reduce": lambda x, platform: collectives.all_reduce(x, AXIS),
    "all_gather": lambda x, platform: collectives.all_gather(x, AXIS, dim=0),
    "reduce_scatter": lambda x, platform: collectives.reduce_scatter(x, AXIS, dim=0),
    "broadcast": _broadcast,
    "all_to_all": lambda x, platform: lax.all_to_all(x, AXIS, 0, 0, tiled=True),
    "permute": lambda x, platform: collectives.shift(x, AXIS),
}
