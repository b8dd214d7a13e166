"""Equality of a sharded module or tensor and its reference on one device: `torchpar.assert_same`."""

import datetime
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from compare.contract.ledger import WORLD
from compare.numerics import same
from compare.numerics.same import Region, Value, differing
from torchpar import testing
from torchpar.comm.collectives import chunk_slices
from torchpar.private import default_store

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""Parts of a parameter's name that torch.compile and other wrappers add."""
WAIT = datetime.timedelta(seconds=2)
"""Time to wait for the values of other ranks."""
LARGEST = 1 << 20
"""Bytes of a value that ranks show each other."""
_calls = itertools.count()


def assert_same(
    sharded: Any,
    reference: Any,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    gradients: bool = False,
) -> None:
    """Raise AssertionError if a result differs from its reference, with the place and the likely cause.

    Both are tensors, modules, numbers, or nested dicts and sequences of them. A DTensor is gathered, so all
    its ranks call this. Of a module the parameters and buffers are compared; with `gradients` also each
    `.grad`. Tolerances are those of torch.testing.assert_close, by dtype.
    """
    __tracebackhide__ = True
    call = next(_calls)
    theirs = dict(named(reference, gradients=gradients))
    values, problems, seen = [], [], set()
    for name, value in named(sharded, gradients=gradients):
        seen.add(name)
        if name not in theirs:
            problems.append(f"{name}: the reference has no such value")
        elif (problem := _other_kind(name, value, theirs[name])) is not None:
            problems.extend(filter(None, [problem]))
        else:
            values.append(_value(name, value, theirs[name]))
    problems += [f"{name}: it is only in the reference" for name in theirs if name not in seen]
    wrong = differing(values, rtol=rtol, atol=atol)
    shown = {
        value.name: _with_copies(value, f"assert_same/{call}/{value.name}") for value in wrong[: same.SHOWN]
    }
    same.assert_same(
        [shown.get(value.name, value) for value in values], rtol=rtol, atol=atol, problems=problems
    )


def named(tree: Any, name: str = "", *, gradients: bool = False) -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts, sequences and modules, with their paths."""
    if isinstance(tree, nn.Module):
        module = tree.module if isinstance(tree, nn.parallel.DistributedDataParallel) else tree
        persistent = module.state_dict(keep_vars=True)
        for path, tensor in persistent.items():
            if not isinstance(tensor, torch.Tensor):
                continue
            for part in WRAPPERS:
                path = path.replace(part, "")
            yield _joined(name, path), tensor
            if gradients and isinstance(tensor, nn.Parameter):
                yield _joined(name, f"{path}.grad"), tensor.grad
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from named(value, _joined(name, str(key)), gradients=gradients)
    elif isinstance(tree, list | tuple):
        for place, value in enumerate(tree):
            yield from named(value, f"{name}[{place}]", gradients=gradients)
    else:
        yield name, tree


def _joined(name: str, path: str) -> str:
    return f"{name}.{path}" if name else path


def _other_kind(name: str, value: Any, reference: Any) -> str | None:
    """The difference of leaves that are not two arrays, '' if they are equal; None for two arrays."""
    is_array = [
        isinstance(leaf, torch.Tensor | np.ndarray | float | int | complex) for leaf in (value, reference)
    ]
    if all(is_array):
        return None
    if not any(is_array):
        return (
            "" if value is reference or value == reference else f"{name}: {value!r} instead of {reference!r}"
        )
    shown = ["None" if leaf is None else type(leaf).__name__ for leaf in (value, reference)]
    what = "the gradient " if name.endswith(".grad") else ""
    return f"{name}: {what}is {shown[0]} instead of {shown[1]}"


def _value(name: str, value: Any, reference: Any) -> Value:
    actual, expected = torch.as_tensor(value).detach(), torch.as_tensor(reference).detach()
    regions, axes = dict[str, Region](), dict[str, int]()
    if isinstance(actual, DTensor):
        regions = regions_of(actual)
        names = actual.device_mesh.mesh_dim_names or ()
        axes = dict(zip(names, actual.device_mesh.shape, strict=False))
    elif dist.is_initialized():
        axes = {testing.axis_of_world or WORLD: dist.get_world_size()}
    tensors = [
        tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in (actual, expected)
    ]
    kinds = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
    arrays = [_array(tensor) for tensor in tensors]
    return Value(
        name=name,
        actual=arrays[0],
        expected=arrays[1],
        dtypes=(kinds[0], kinds[1]),
        regions=regions,
        axes=axes,
    )


def _array(tensor: torch.Tensor) -> np.ndarray:
    """A tensor of any dtype, device and layout in NumPy."""
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    is_wide = dense.dtype in (torch.float64, torch.float32, torch.complex64, torch.complex128)
    is_exact = not (dense.is_floating_point() or dense.is_complex())
    return (dense if is_wide or is_exact else dense.float()).cpu().resolve_conj().numpy()


def regions_of(tensor: DTensor) -> dict[str, Region]:
    """The part of a DTensor on each rank; {} unless its placements are plain shards and replicas."""
    if not all(type(placement) in (Shard, Replicate) for placement in tensor.placements):
        return {}
    mesh = tensor.device_mesh
    regions = {}
    for place in itertools.product(*map(range, mesh.shape)):
        region = [slice(0, size) for size in tensor.shape]
        for placement, size, coordinate in zip(tensor.placements, mesh.shape, place, strict=True):
            if isinstance(placement, Shard):
                whole = region[placement.dim]
                part = chunk_slices(whole.stop - whole.start, size)[coordinate]
                region[placement.dim] = slice(whole.start + part.start, whole.start + part.stop)
        regions[f"rank {int(mesh.mesh[place])}"] = tuple(region)
    return regions


def _with_copies(value: Value, key: str) -> Value:
    """A value that differs, with the values of the other ranks, if they differ there, too, and are not equal.

    Ranks exchange them through the store of the default group: a collective could wait for a rank forever
    that has no difference.
    """
    if value.regions or not dist.is_initialized() or value.actual.nbytes > LARGEST:
        return value
    store, ranks = default_store(), dist.get_world_size()
    store.set(f"{key}/{dist.get_rank()}", value.actual.tobytes())
    keys = [f"{key}/{rank}" for rank in range(ranks)]
    try:
        store.wait(keys, WAIT)
        data = [store.get(key) for key in keys]
    except RuntimeError:  # another rank has no difference
        return value
    size, dtype = math.prod(value.actual.shape), value.actual.dtype
    if any(len(part) != size * dtype.itemsize for part in data):
        return value
    copies = [np.frombuffer(part, dtype).reshape(value.actual.shape) for part in data]
    if all(np.array_equal(copy, copies[0], equal_nan=dtype.kind in "fc") for copy in copies):
        return value
    return replace(value, copies=copies)
