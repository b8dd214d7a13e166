"""XLA's code generation for tests: five times cheaper, and every HLO pass stays as it is.

Most of a JAX engine's time here is LLVM's work on some 300 small kernels. A step costs 10.3 CPU seconds with
XLA's defaults and 2.2 with these flags (fp64, ZeRO 3 on 4 devices). The flags do not change the HLO passes.
tests/compare/test_golden.py compares the default code generation with nanoGPT's own numbers.
`XLA_FLAGS= make test` runs all tests with the default.
"""

import functools
import importlib.metadata
import os
import subprocess
import sys

QUICK = " ".join(
    [
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_backend_optimization_level=0",
        "--xla_cpu_parallel_codegen_split_count=1",  # each part has a copy of what the kernels share
    ]
)
KNOWN_TO = ("0.10.",)  # versions of jaxlib that have been seen to take the flags


def use() -> None:
    """Put the flags into the environment of all that the tests start, unless there are others."""
    if "XLA_FLAGS" not in os.environ and is_known(QUICK):
        os.environ["XLA_FLAGS"] = QUICK


@functools.cache
def is_known(flags: str) -> bool:
    """True if the XLA that is installed, if any, takes these flags: it aborts on others."""
    try:
        version = importlib.metadata.version("jaxlib")
    except importlib.metadata.PackageNotFoundError:
        return False
    if version.startswith(KNOWN_TO):
        return True
    command = [sys.executable, "-c", "import jax; jax.devices('cpu')"]
    return not subprocess.run(command, env={**os.environ, "XLA_FLAGS": flags}, capture_output=True).returncode
