"""Time collectives between devices: `shard_map` and `lax`.

On a CPU the devices of a process are threads that share memory, so a "message" is a copy, and the time of a
small one is that of a jitted call; between processes JAX sends by gloo. Each call is waited for.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from compare.contract.collective_bench import (
    SIDE,
    TYPE,
    CollectiveCase,
    CollectiveRequest,
    CollectiveSide,
    append_row,
    elements,
    expected,
    make_row,
    measure,
    sent,
)
from compare.host.facts import versions
from compare.host.json_files import write_json
from compare.spec.axes import DP_REPLICATE
from compare.spec.experiment import Layout
from jaxpar.comm import collectives, hosts
from jaxpar.comm.mesh import device_kind, make_mesh
from jaxpar.measure.usage import PACKAGES, threads

AXIS = DP_REPLICATE  # any would do: the mesh has no other of more than one device
MASKED_SUM = "xla: broadcast is an all-reduce of zeros and the first rank's numbers: XLA has none on a CPU"


def run_bench(request: CollectiveRequest, folder: Path, *, progress: Callable[..., None]) -> None:
    """Do a request: rows.jsonl, then side.json in `folder`.

    Args:
        request: kinds and sizes to time.
        folder: where.
        progress: called after every row: the caller's watchdog.

    Raises:
        MissingDevicesError: fewer devices than ranks.
    """
    mesh = make_mesh(Layout(dp_replicate=request.ranks), platform=request.platform)
    devices, is_first = list(mesh.devices.flat), jax.process_index() == 0
    for case in request.cases:
        for name in request.implementations:
            row = time_case(name, case, mesh, request)
            progress()
            if is_first:
                append_row(folder, row)
    on_hosts = tuple(hosts.hosts_of(devices))
    broadcasts = any(case.kind == "broadcast" for case in request.cases)
    side = CollectiveSide(
        device_kind=device_kind(devices[0]),
        versions=versions(PACKAGES),
        threads=threads(devices),
        hosts=on_hosts,
        notes=(MASKED_SUM,) if broadcasts and request.platform == "cpu" else (),
    )
    if is_first:
        write_json(folder / SIDE, side)


def time_case(name: str, case: CollectiveCase, mesh: Mesh, request: CollectiveRequest):
    """Time one collective of one size, then do it once more and look at what it gave on each device."""
    ranks, mesh_rank = request.ranks, {device: rank for rank, device in enumerate(mesh.devices.flat)}
    count = elements(case.kind, case.size, ranks)
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    given = _place(sharding, lambda rank: sent(case.kind, rank, ranks=ranks, count=count))
    collective = collectives.per_device(
        partial(OPERATIONS[case.kind], platform=request.platform),
        mesh=mesh,
        in_specs=sharding.spec,
        out_specs=sharding.spec,
    )
    compiled = jax.jit(collective).lower(given).compile()
    hosts.meet("compiled")
    call = lambda: jax.block_until_ready(compiled(given))  # noqa: E731
    slowest = lambda value: max(hosts.gathered([value]))  # noqa: E731
    seconds, iterations = measure(call, wait=lambda: None, slowest=slowest, row_s=request.row_s)
    results = {mesh_rank[shard.device]: np.asarray(shard.data) for shard in call().addressable_shards}
    if case.kind == request.fault and ranks - 1 in results:
        results[ranks - 1] = results[ranks - 1] + np.eye(1, len(results[ranks - 1]), dtype=TYPE)[0]
    own = sum(
        int((result != expected(case.kind, rank, ranks=ranks, count=count)).sum())
        for rank, result in results.items()
    )
    wrong = int(sum(hosts.gathered([own])))
    return make_row(name, case, ranks=ranks, seconds=seconds, iterations=iterations, wrong=wrong)


def _broadcast(x: jax.Array, *, platform: str) -> jax.Array:
    if platform == "gpu":
        return lax.pbroadcast(x, AXIS, 0)
    return collectives.all_reduce(jax.numpy.where(lax.axis_index(AXIS) == 0, x, 0), AXIS)


OPERATIONS: dict[str, Callable[..., jax.Array]] = {
    "all_reduce": lambda x, platform: collectives.all_reduce(x, AXIS),
    "all_gather": lambda x, platform: collectives.all_gather(x, AXIS, dim=0),
    "reduce_scatter": lambda x, platform: collectives.reduce_scatter(x, AXIS, dim=0),
    "broadcast": _broadcast,
    "all_to_all": lambda x, platform: lax.all_to_all(x, AXIS, 0, 0, tiled=True),
    "permute": lambda x, platform: collectives.shift(x, AXIS, by=-1),
}


def _place(sharding: NamedSharding, numbers: Callable[[int], np.ndarray]) -> jax.Array:
    """Each device's own numbers, by its rank, as one array over all of them."""
    devices = list(sharding.mesh.devices.flat)
    own = [rank for rank, device in enumerate(devices) if device.process_index == jax.process_index()]
    shards = [jax.device_put(numbers(rank), devices[rank]) for rank in own]
    shape = (len(shards[0]) * len(devices),)
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)
