"""Time collectives between the devices of this process: `shard_map` and `lax`.

On a CPU the devices are threads that share memory, so a "message" is a copy, and the time of a small one is
that of a jitted call. Each call is waited for.
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
from jaxpar.comm import collectives
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
    devices = list(mesh.devices.flat)
    for case in request.cases:
        for name in request.implementations:
            append_row(folder, time_case(name, case, mesh, request))
            progress()
    broadcasts = any(case.kind == "broadcast" for case in request.cases)
    side = CollectiveSide(
        device_kind=device_kind(devices[0]),
        versions=versions(PACKAGES),
        threads=threads(devices),
        notes=(MASKED_SUM,) if broadcasts and request.platform == "cpu" else (),
    )
    write_json(folder / SIDE, side)


def time_case(name: str, case: CollectiveCase, mesh: Mesh, request: CollectiveRequest):
    """Time one collective of one size, then do it once more and look at what it gave on each device."""
    ranks = request.ranks
    count = elements(case.kind, case.size, ranks)
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    given = _place(sharding, [sent(case.kind, rank, ranks=ranks, count=count) for rank in range(ranks)])
    collective = collectives.per_device(
        partial(OPERATIONS[case.kind], platform=request.platform),
        mesh=mesh,
        in_specs=sharding.spec,
        out_specs=sharding.spec,
    )
    compiled = jax.jit(collective).lower(given).compile()
    call = lambda: jax.block_until_ready(compiled(given))  # noqa: E731
    seconds, iterations = measure(call, wait=lambda: None, slowest=lambda value: value, row_s=request.row_s)
    results = [np.asarray(shard.data) for shard in _in_order(call())]
    if case.kind == request.fault:
        results[-1] = results[-1] + np.eye(1, len(results[-1]), dtype=TYPE)[0]
    wrong = sum(
        int((result != expected(case.kind, rank, ranks=ranks, count=count)).sum())
        for rank, result in enumerate(results)
    )
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


def _place(sharding: NamedSharding, pieces: list[np.ndarray]) -> jax.Array:
    """Each device's own numbers, as one array over all of them."""
    devices = list(sharding.mesh.devices.flat)
    shards = [jax.device_put(piece, device) for piece, device in zip(pieces, devices, strict=True)]
    shape = (sum(len(piece) for piece in pieces),)
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _in_order(array: jax.Array) -> list[jax.Shard]:
    """Its shards, by the places that they have in it."""
    return sorted(array.addressable_shards, key=lambda shard: shard.index[0].start or 0)
