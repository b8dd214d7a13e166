"""Which compiled programs are kept between runs: none whose collectives would lose their order."""

import os
import subprocess
import sys

import pytest
from msgspec.structs import replace

from compare.contract.request import REQUEST, Request
from compare.host.json_files import write_json
from compare.spec.experiment import Experiment, Layout

COMPILE = """
import sys
from pathlib import Path
from compare.contract.request import read_request
from jaxpar.configuration import configure_jax
configure_jax(read_request(Path(sys.argv[1])))
import jax
jax.jit(lambda x: x + 1)(1.0)
"""


@pytest.mark.parametrize(
    ("layout", "is_kept"), [(Layout(), True), (Layout(dp_replicate=2), False), (Layout(tp=2), False)]
)
@pytest.mark.parametrize("whose", ["request", "environment"])
def test_programs_of_several_cpu_devices_are_not_kept(tmp_path, tiny: Experiment, layout, is_kept, whose):
    cache, environment = tmp_path / "cache", dict(os.environ)
    request = Request(engine="jax-manual", experiment=replace(tiny, layout=layout))
    if whose == "request":
        request = replace(request, cache_dir=str(cache))
    else:
        limits = {"MIN_COMPILE_TIME_SECS": "0", "MIN_ENTRY_SIZE_BYTES": "-1"}
        environment |= {f"JAX_PERSISTENT_CACHE_{name}": value for name, value in limits.items()}
        environment["JAX_COMPILATION_CACHE_DIR"] = str(cache)
    write_json(tmp_path / REQUEST, request)
    subprocess.run([sys.executable, "-c", COMPILE, str(tmp_path)], env=environment, check=True)
    assert (cache.is_dir() and any(cache.iterdir())) == is_kept
