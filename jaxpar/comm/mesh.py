"""Devices and the mesh over them. The mesh has one axis for each degree of the layout, with its name."""

from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

from compare.spec.experiment import Layout
from compare.system.facts import MissingDevicesError, cpu_model


def make_mesh(layout: Layout, *, platform: str) -> Mesh:
    """A mesh over the first devices of a platform; raises MissingDevicesError.

    It has all of `layout.axes`, also those of size 1. The outermost axes cross from host to host. The axes
    are Auto: the compiler propagates shardings, and `shard_map` makes an axis manual.
    """
    return mesh_over(find_devices(layout.devices, platform=platform), layout)


def mesh_over(devices: Sequence[jax.Device], layout: Layout) -> Mesh:
    """The mesh of `make_mesh` over given devices, which need not be here."""
    axes = layout.axes
    types = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types, devices=devices)


def find_devices(count: int, *, platform: str) -> list[jax.Device]:
    """The first devices of a platform on all hosts, in the order of the processes.

    Raises MissingDevicesError: fewer devices are there.
    """
    try:
        devices, why = jax.devices(platform), ""
    except RuntimeError as error:  # JAX finds no such backend
        devices, why = [], f" ({error})"
    if len(devices) < count:
        raise MissingDevicesError(
            f"the layout needs {count} {platform} devices and JAX finds {len(devices)}{why}: lower a degree "
            f"of the layout, or use platform cpu, whose devices are virtual"
        )
    return devices[:count]


def device_kind(device: jax.Device) -> str:
    """The model of a GPU as JAX names it; for a CPU, which JAX does not name, the model of the machine's."""
    return cpu_model() if device.platform == "cpu" else device.device_kind
