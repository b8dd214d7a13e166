"""Devices and the mesh over them: one mesh axis for each degree of the layout, with the same name."""

import os
import platform as host
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from compare.contract.experiment import Layout
from jaxpar.errors import MissingDevicesError


def make_mesh(layout: Layout, *, platform: str) -> Mesh:
    """A mesh over the first `layout.devices` local devices: the axes are `layout.axes`, of size 1 included.

    The axes are Auto: the compiler propagates shardings, and `shard_map` makes an axis manual.

    Args:
        layout: its degrees are the mesh's shape.
        platform: cpu or gpu.

    Raises:
        MissingDevicesError: fewer devices than the layout needs, or none of that platform. JAX itself
            would go on with the devices that it finds.
    """
    try:
        devices = jax.local_devices(backend=platform)
    except RuntimeError as error:  # JAX's word for a backend that is not there
        raise MissingDevicesError(
            f"the layout needs {layout.devices} {platform} devices and JAX finds 0 ({error}): install JAX's "
            f"plugin for them, or use platform cpu"
        ) from None
    if len(devices) < layout.devices:
        raise MissingDevicesError(
            f"the layout needs {layout.devices} {platform} devices and JAX finds {len(devices)}: lower "
            f"a degree of the layout, or use platform cpu, whose devices are virtual"
        )
    axes = layout.axes
    grid = np.array(devices[: layout.devices]).reshape(tuple(axes.values()))
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def device_kind(device: jax.Device) -> str:
    """The model of a GPU as JAX names it; for a CPU, whose name JAX does not know, the machine's."""
    return cpu_model() if device.platform == "cpu" else device.device_kind


def cpu_model() -> str:
    """The processor's model name, or its architecture where the system does not tell."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else host.processor() or host.machine()


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
