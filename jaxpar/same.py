"""Equality of a sharded pytree and its reference on one device: `jaxpar.assert_same`."""

import math
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from compare.numerics import same
from compare.numerics.same import Region, Value


def assert_same(
    sharded: Any, reference: Any, *, rtol: float | None = None, atol: float | None = None
) -> None:
    """Raise AssertionError if a result differs from its reference, with the place and the likely cause.

    Both are arrays or pytrees of them, such as gradients, optimizer states and flax.nnx modules. Arrays may
    have any sharding on the devices of this process. Tolerances are those of torch.testing.assert_close, by
    dtype.
    """
    __tracebackhide__ = True
    mine, theirs = ({_name(path): leaf for path, leaf in _leaves(tree)} for tree in (sharded, reference))
    problems = [f"{name}: the reference has no such value" for name in mine if name not in theirs]
    problems += [f"{name}: it is only in the reference" for name in theirs if name not in mine]
    values = [_value(name, leaf, theirs[name]) for name, leaf in mine.items() if name in theirs]
    same.assert_same(values, rtol=rtol, atol=atol, problems=problems)


def _leaves(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _value(name: str, leaf: Any, reference: Any) -> Value:
    actual, expected = (_without_key(array) for array in (leaf, reference))
    regions, copies, axes = dict[str, Region](), list[np.ndarray](), dict[str, int]()
    if isinstance(actual, jax.Array):
        copies = _copies(actual)
        regions = {f"device {device.id}": region for device, region in _regions(actual).items()}
        if isinstance(actual.sharding, NamedSharding):
            axes = dict(actual.sharding.mesh.shape)
    return Value(
        name=name,
        actual=_array(actual),
        expected=_array(expected),
        dtypes=(str(jnp.result_type(actual)), str(jnp.result_type(expected))),
        regions=regions,
        copies=copies,
        axes=axes,
    )


def _without_key(array: Any) -> Any:
    """The numbers of a random key; any other array unchanged."""
    is_key = isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(array) if is_key else array


def _array(array: Any) -> np.ndarray:
    """An array in NumPy; of a dtype that NumPy has not, such as bfloat16, in float32."""
    whole = np.asarray(array)
    return whole if whole.dtype.kind in "biufc" else whole.astype(np.float32)


def _regions(array: jax.Array) -> dict[jax.Device, Region]:
    """The part of an array on each device; {} if all devices have all of it."""
    if array.is_fully_replicated:
        return {}
    return dict(array.sharding.devices_indices_map(array.shape))


def _copies(array: jax.Array) -> list[np.ndarray]:
    """The whole array as each replica has it, if the replicas differ; otherwise [].

    `shard_map` with check_vma=False can return an array whose copies differ.
    """
    parts: dict[str, list[jax.Shard]] = defaultdict(list)
    for shard in array.addressable_shards:
        parts[str(shard.index)].append(shard)
    counts = {len(shards) for shards in parts.values()}
    if max(counts) == 1 or len(counts) > 1 or math.prod(array.shape) == 0:
        return []
    data = {index: [_array(shard.data) for shard in shards] for index, shards in parts.items()}
    if all(np.array_equal(copy, copies[0], equal_nan=True) for copies in data.values() for copy in copies):
        return []
    wholes = []
    for number in range(counts.pop()):
        whole = np.empty(array.shape, _array(array).dtype)
        for index, shards in parts.items():
            whole[shards[0].index] = data[index][number]
        wholes.append(whole)
    return wholes
