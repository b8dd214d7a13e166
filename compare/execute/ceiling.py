"""This machine's matmul ceiling, measured by a side in a process of its own."""

import sys

import msgspec

from compare.contract.ceiling import Ceiling, CeilingRequest
from compare.execute.ask import ask
from compare.execute.launch import EnvironmentMissing, child_environment
from compare.spec.engines.registry import SIDES


def measure_ceiling(
    side: str,
    platform: str = "cpu",
    dtype: str = "float32",
    python: str = sys.executable,
    *,
    threads: int = 0,
    sizes: tuple[int, ...] = (),
) -> Ceiling:
    """Ask a side how fast its framework multiplies matrices here. It takes about a second, and an import.

    Args:
        side: a name in SIDES.
        platform: cpu or gpu.
        dtype: of the products: `Precision.product_dtype`.
        python: that runs the side.
        threads: CPU threads; 0 for one on each core. A run of torchpar has one for each rank, and jaxpar's
            always has all of them.
        sizes: of further products: `Ceiling.by_size`.

    Raises:
        EnvironmentMissing: the side cannot say, and why.
    """
    asked = {"dtype": dtype, "platform": platform, "threads": threads, "sizes": sizes}
    request = msgspec.convert(asked, CeilingRequest)
    found = ask(
        side,
        python,
        ["--ceiling", msgspec.json.encode(request).decode()],
        answer=Ceiling,
        environment=child_environment(SIDES[side], platform),
    )
    if isinstance(found, str):
        raise EnvironmentMissing(f"no matmul ceiling: {found}")
    return found
