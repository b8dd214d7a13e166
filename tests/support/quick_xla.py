"""XLA's code generation for tests: five times cheaper, and every HLO pass stays as it is.

Nearly all that a JAX engine costs here is LLVM's work on some 300 small kernels for a model that trains in
a second: 10.3 CPU seconds a step as XLA does it by default, 2.2 so (fp64, ZeRO 3 on 4 devices). What XLA
inserts, keeps and computes are the HLO's, which these flags leave alone; the default code generation is held
to nanoGPT's own numbers by tests/compare/test_golden.py. `XLA_FLAGS= make test` runs all with the default.
"""

import functools
import importlib.metadata
import os
import subprocess
import sys

QUICK = "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0"
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
