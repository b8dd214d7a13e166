"""The compilation cache skips programs whose collectives would lose their order."""

import os
import subprocess
import sys

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


def test_cache_skips_several_cpu_devices(tmp_path, tiny: Experiment):
    """A user's environment may name a cache, too."""
    limits = {"MIN_COMPILE_TIME_SECS": "0", "MIN_ENTRY_SIZE_BYTES": "-1"}
    for number, (layout, whose, is_kept) in enumerate(
        (
            (Layout(), "request", True),
            (Layout(dp_replicate=2), "request", False),
            (Layout(tp=2), "environment", False),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        cache, environment = folder / "cache", dict(os.environ)
        request = Request(engine="jax-manual", experiment=replace(tiny, layout=layout))
        if whose == "request":
            request = replace(request, cache_dir=str(cache))
        else:
            environment |= {f"JAX_PERSISTENT_CACHE_{name}": value for name, value in limits.items()}
            environment["JAX_COMPILATION_CACHE_DIR"] = str(cache)
        write_json(folder / REQUEST, request)
        subprocess.run([sys.executable, "-c", COMPILE, str(folder)], env=environment, check=True)
        assert (cache.is_dir() and any(cache.iterdir())) == is_kept, (layout, whose)
