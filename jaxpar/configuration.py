"""Everything that has to be set before JAX starts a backend, which then keeps its devices and platform."""

import jax

from compare.contract.request import Request
from compare.side.processes import Process
from compare.spec.experiment import ExperimentError

PACKAGES = ("numpy", "jax", "jaxlib", "flax", "optax")


def configure_jax(request: Request, process: Process | None = None) -> None:
    """All that a training needs; of several processes, join them."""
    experiment = request.experiment
    configure_products(request.platform, experiment.precision.product_dtype)
    if process and request.profile:
        raise ExperimentError("profile: a timeline is read from one process: run it on one host")
    join_devices(request.platform, experiment.layout.devices, process, timeout_s=request.timeout_s)
    if request.cache_dir:
        jax.config.update("jax_compilation_cache_dir", request.cache_dir)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        # The ledger reads the names of scopes: a program kept with those of an older version is another one.
        jax.config.update("jax_compilation_cache_include_metadata_in_key", True)


def configure_products(platform: str, dtype: str) -> None:
    """The platform, and how matrix products are computed on it."""
    jax.config.update("jax_platforms", "cuda,cpu" if platform == "gpu" else "cpu")
    jax.config.update("jax_enable_x64", dtype == "float64")
    by_dtype = {"float32": "highest", "tf32": "tensorfloat32"}
    if dtype in by_dtype:  # on NVIDIA GPUs the default for float32 products is TF32
        jax.config.update("jax_default_matmul_precision", by_dtype[dtype])


def join_devices(platform: str, devices: int, process: Process | None, *, timeout_s: float) -> None:
    """This process's part of the devices, in reach of all others.

    Only a CPU has virtual devices. For several of them no compiled program is kept. XLA's CPU runtime runs
    what is independent side by side, but for collectives, which have an order. A program that is read from a
    file has lost it (jaxlib 0.10.2). As collectives of a kind meet by nothing but their order, it hangs or
    crashes on a busy machine, or one device's gather meets another gather of the other device: then its
    numbers are wrong, without a word.

    Raises MissingDevicesError: the processes do not divide the devices.
    """
    share = devices // process.count or 1 if process else devices
    if platform == "cpu":
        jax.config.update("jax_num_cpu_devices", share)
    if process or (platform == "cpu" and devices > 1):
        jax.config.update("jax_enable_compilation_cache", False)  # also that of a user's environment
    if process:
        from jaxpar.comm.hosts import join

        join(process, devices=devices, platform=platform, timeout_s=timeout_s)
