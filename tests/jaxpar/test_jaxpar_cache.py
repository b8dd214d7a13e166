"""The compilation cache skips programs whose collectives would lose their order."""

import os
import subprocess
import sys

import pytest
from msgspec.structs import replace

from compare.contract.request import REQUEST, Request
from compare.spec.experiment import Experiment, Layout
from compare.system.json_files import write_json

COMPILE = """
import sys
from pathlib import Path
from compare.contract.request import read_request
from jaxpar.configuration import configure_jax
configure_jax(read_request(Path(sys.argv[1]), "jaxpar"))
import jax
jax.jit(lambda x: x + 1)(1.0)
"""


LIMITS = {"MIN_COMPILE_TIME_SECS": "0", "MIN_ENTRY_SIZE_BYTES": "-1"}


@pytest.mark.parametrize(
    ("layout", "in_environment", "is_kept"),
    [(Layout(), False, True), (Layout(dp_replicate=2), False, False), (Layout(tp=2), True, False)],
    ids=["one device", "two devices", "environment"],
)
def test_cache_skips_several_cpu_devices(tmp_path, tiny: Experiment, layout, in_environment, is_kept):
    """A user's environment may name a cache, too."""
    cache, environment = tmp_path / "cache", dict(os.environ)
    request = Request(engine="jax-manual", experiment=replace(tiny, layout=layout))
    if in_environment:
        environment |= {f"JAX_PERSISTENT_CACHE_{name}": value for name, value in LIMITS.items()}
        environment["JAX_COMPILATION_CACHE_DIR"] = str(cache)
    else:
        request = replace(request, cache_dir=str(cache))
    write_json(tmp_path / REQUEST, request)
    subprocess.run([sys.executable, "-c", COMPILE, str(tmp_path)], env=environment, check=True)
    assert (cache.is_dir() and any(cache.iterdir())) == is_kept
