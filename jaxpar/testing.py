"""Devices for tests of your own functions: the side of `torchpar.plugin.hooks` for `@pytest.mark.devices`."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from compare.system.facts import MissingDevicesError


@dataclass(frozen=True)
class Place:
    """A process with several devices."""

    platform: str
    count: int

    def begin(self, sizes: Mapping[str, int]) -> None:
        """Begin a test whose mark has this mesh."""

    def mesh(self, sizes: Mapping[str, int], types: Sequence[str]) -> Mesh:
        """The mesh over the devices, with sizes and types (auto, explicit, manual) by axis."""
        kinds = tuple(AxisType[kind.capitalize()] for kind in types)
        devices = jax.devices()[: self.count]
        return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices)


def join(job: Mapping[str, Any]) -> Place:
    """Give this process its devices, before JAX starts a backend."""
    place = Place(platform=job["platform"], count=job["count"])
    jax.config.update("jax_platforms", "cuda,cpu" if place.platform == "gpu" else "cpu")
    prepare(place)
    return place


def prepare(place: Place) -> None:
    """Set the number of devices, again after a file was imported: a conftest.py may have set another."""
    if place.platform == "gpu":
        return
    with contextlib.suppress(RuntimeError):  # a backend has started
        jax.config.update("jax_num_cpu_devices", place.count)
    if place.count > 1:  # see jaxpar.configuration.join_devices
        jax.config.update("jax_enable_compilation_cache", False)


def check(place: Place) -> None:
    """Raises MissingDevicesError: JAX has fewer devices than the mark asks for."""
    if (found := jax.device_count()) < place.count:
        how = (
            "use fewer GPUs"
            if place.platform == "gpu"
            else "set no number of devices when the file is imported"
        )
        raise MissingDevicesError(f"JAX has {found} devices, and the mark asks for {place.count}: {how}")


def leave(place: Place) -> None:
    """Nothing: devices need no farewell."""


def explain(error: BaseException) -> str:
    """Nothing: JAX explains its errors."""
    return ""


def is_lost(error: BaseException) -> bool:
    """False: this process is alone."""
    return False
