"""Devices and the mesh over them: one mesh axis for each degree of the layout, with the same name."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from compare.spec.experiment import Layout
from compare.system.facts import MissingDevicesError, cpu_model


def make_mesh(layout: Layout, *, platform: str) -> Mesh:
    """A mesh over the first devices of a platform, as of `find_devices`: `layout.axes`, of size 1 included.

    Of several hosts, the outermost axes cross from one to another. The axes are Auto: the compiler propagates
    shardings, and `shard_map` makes an axis manual.
    """
    axes = layout.axes
    grid = np.array(find_devices(layout.devices, platform=platform)).reshape(tuple(axes.values()))
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def typed(mesh: Mesh) -> Mesh:
    """The same devices, with every axis Explicit: where an array lives along it is part of its type."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * len(mesh.axis_names))


def find_devices(count: int, *, platform: str) -> list[jax.Device]:
    """The first devices of a platform, on all hosts, in the order of the processes; MissingDevicesError."""
    try:
        devices, why = jax.devices(platform), ""
    except RuntimeError as error:  # JAX's word for a backend that is not there
        devices, why = [], f" ({error})"
    if len(devices) < count:
        raise MissingDevicesError(
            f"the layout needs {count} {platform} devices and JAX finds {len(devices)}{why}: lower a degree "
            f"of the layout, or use platform cpu, whose devices are virtual"
        )
    return devices[:count]


def device_kind(device: jax.Device) -> str:
    """The model of a GPU as JAX names it; for a CPU, whose name JAX does not know, the machine's."""
    return cpu_model() if device.platform == "cpu" else device.device_kind
