"""The matmul ceiling: the search for it on a clock by hand, and both sides' real answers."""

import sys

import pytest

from compare.execute.query import measure_ceiling
from compare.side import ceiling
from compare.side.ceiling import CeilingRequest, find_ceiling

REQUEST = CeilingRequest(dtype="float32")


class Machine:
    """Multiplies at a rate of its own; the first product of a size, and every second reading, are slow."""

    def __init__(self, flops_per_s: float):
        self.flops_per_s, self.readings = flops_per_s, []

    def prepare(self, size: int):
        calls = []

        def multiply(products: int) -> float:
            calls.append(products)
            self.readings.append((size, products))
            slow = 5.0 if len(calls) == 1 or len(calls) % 2 else 1.0
            return slow * products * 2 * size**3 / self.flops_per_s

        return multiply


def test_the_best_reading_of_a_size_that_takes_long_enough_in_a_few_seconds():
    for flops_per_s, size in ((1e9, 512), (285e9, 2048), (2e12, 4096), (800e12, ceiling.LARGEST)):
        machine = Machine(flops_per_s)
        found = find_ceiling(REQUEST, machine.prepare)
        assert found.flops_per_s == pytest.approx(flops_per_s)
        assert max(size for size, _ in machine.readings) == size
        seconds = sum(2 * size**3 * products / flops_per_s for size, products in machine.readings)
        assert flops_per_s == 1e9 or 0.2 < seconds < 3


@pytest.mark.usefixtures("warm_sides")
def test_every_side_measures_its_own():
    for side in ("jaxpar", "torchpar"):
        found = measure_ceiling(side, sys.executable, REQUEST)
        assert 1e8 < found.flops_per_s < 1e15
