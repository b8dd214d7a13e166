"""JAX as the tests of jaxpar have it: four virtual devices of the CPU, and float64."""

from collections.abc import Generator

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_enable_x64", True)


@pytest.fixture
def without_x64() -> Generator[None]:
    """JAX as it is by default, for a test of what a float32 run allocates."""
    jax.config.update("jax_enable_x64", False)
    yield
    jax.config.update("jax_enable_x64", True)
