"""XLA's best rate of matrix products on this machine: `python -m jaxpar --ceiling JSON`."""

import time

import jax
import jax.numpy as jnp
import numpy as np

from compare.contract.ceiling import Ceiling, CeilingRequest, Multiply, find_ceiling
from compare.host.facts import MissingDevicesError, cores
from compare.spec.experiment import ExperimentError


def measure(request: CeilingRequest) -> Ceiling:
    """Measure the ceiling of one GPU, or of the CPU. JAX is configured for the request's platform and dtype.

    Raises:
        ExperimentError: other threads than XLA's, which are one for each core.
        MissingDevicesError: no such device.
    """
    if request.threads not in (0, cores()):
        raise ExperimentError(
            f"--ceiling: threads = {request.threads}: XLA computes with one pool of threads over all "
            f"{cores()} cores; give 0"
        )
    try:
        device = jax.local_devices(backend=request.platform)[0]
    except RuntimeError as error:  # JAX's word for a backend that is not there
        raise MissingDevicesError(
            f"platform {request.platform}: JAX finds no such device ({error})"
        ) from None
    dtype = jnp.dtype("float32" if request.dtype == "tf32" else request.dtype)
    return find_ceiling(request, lambda size: _prepared(size, dtype, device))


def _prepared(size: int, dtype: np.dtype, device: jax.Device) -> Multiply:
    random = np.random.default_rng(0)
    x, w = (random.standard_normal((size, size), np.float32) for _ in range(2))
    # Scaled so that the product of products stays as large as x.
    x, w = jax.device_put((x.astype(dtype), (w / size**0.5).astype(dtype)), device)
    product = jax.jit(jnp.matmul)

    def multiply(products: int) -> float:
        y = x
        begun = time.perf_counter()
        for _ in range(products):
            y = product(y, w)  # each takes the last one's result: to wait for it is to wait for all
        y.block_until_ready()
        return time.perf_counter() - begun

    return multiply
