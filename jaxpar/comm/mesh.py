"""Devices and the mesh over them: one mesh axis for each degree of the layout, with the same name."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from compare.contract.experiment import Layout
from compare.contract.host.facts import MissingDevicesError, cpu_model


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
