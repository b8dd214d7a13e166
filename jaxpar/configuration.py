"""Settings that precede a backend of JAX: a backend keeps the devices and platform with which it starts."""

import jax

from compare.contract.request import Request
from compare.side.collective_bench import TYPE, CollectiveRequest
from compare.side.processes import Process
from compare.spec.experiment import ExperimentError
from jaxpar.comm.hosts import join


def configure_jax(request: Request | CollectiveRequest, process: Process | None = None) -> None:
    """Set the platform, the precision of products, the devices and the compilation cache of a request.

    Raises MissingDevicesError: the processes do not divide the devices.
    """
    if isinstance(request, CollectiveRequest):
        configure_products(request.platform, TYPE.name)
        join_devices(request.platform, request.ranks, process, timeout_s=request.timeout_s)
        return
    experiment = request.experiment
    configure_products(request.platform, experiment.precision.product_dtype)
    if process and request.profile:
        raise ExperimentError("profile: a timeline is read from one process: run it on one host")
    join_devices(request.platform, experiment.layout.devices, process, timeout_s=request.timeout_s)
    if request.cache_dir:
        jax.config.update("jax_compilation_cache_dir", request.cache_dir)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        # The ledger reads the names of scopes, so a program with old names must not be loaded.
        jax.config.update("jax_compilation_cache_include_metadata_in_key", True)


def configure_products(platform: str, dtype: str) -> None:
    """Set the platform and the dtype of matrix products on it."""
    jax.config.update("jax_platforms", "cuda,cpu" if platform == "gpu" else "cpu")
    jax.config.update("jax_enable_x64", dtype == "float64")
    by_dtype = {"float32": "highest", "tf32": "tensorfloat32"}
    if dtype in by_dtype:  # on NVIDIA GPUs the default for float32 products is TF32
        jax.config.update("jax_default_matmul_precision", by_dtype[dtype])


def join_devices(platform: str, devices: int, process: Process | None, *, timeout_s: float) -> None:
    """Set this process's number of devices, and join the other processes.

    A program for several CPU devices is never loaded from the compilation cache. XLA's CPU runtime runs
    independent operations at the same time, except collectives, which have an order. A loaded program has
    lost the order (jaxlib 0.10.2). It may hang, crash, or combine two different gathers, which gives wrong
    numbers.

    Raises MissingDevicesError: the processes do not divide the devices.
    """
    share = devices // process.count or 1 if process else devices
    if platform == "cpu":
        jax.config.update("jax_num_cpu_devices", share)
    if process or (platform == "cpu" and devices > 1):
        jax.config.update("jax_enable_compilation_cache", False)
    if process:
        join(process, devices=devices, platform=platform, timeout_s=timeout_s)
