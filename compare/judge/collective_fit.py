"""Latency and bandwidth of a collective, fitted to its times: time = latency + size / bandwidth."""

import math
import statistics
from collections.abc import Sequence

import numpy as np
from msgspec import UNSET, Struct, UnsetType

from compare.contract.collective_bench import CollectiveRow

ROUNDING = 1e-9
"""Share of the latency: a smaller growth over all sizes counts as none."""
FEWEST = 3
"""Sizes below which a line says nothing."""


class Fit(Struct, frozen=True, kw_only=True):
    """A line through the times of one implementation of one collective on so many ranks."""

    implementation: str
    kind: str
    ranks: int
    latency_us: float
    """Time of a call beyond its bytes."""
    misfit: float
    """Median distance of a measured time from the line, as a fraction of it."""
    bandwidth_gb_s: float | UnsetType = UNSET
    """1e9 bytes of `size` a second, as algbw; not set where time does not grow with size."""

    @property
    def bytes_per_s(self) -> float:
        """The bandwidth; infinite where time does not grow with size."""
        return math.inf if self.bandwidth_gb_s is UNSET else self.bandwidth_gb_s * 1e9


def fit_line(sizes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """Latency and seconds a byte of t = latency + size * s, neither negative, by weighted least squares.

    Each time counts with its relative error, so that a kilobyte weighs as much as a gigabyte.

    Args:
        sizes: bytes.
        times: seconds.
    """
    from scipy.optimize import nnls  # half a second to import

    size, time = np.asarray(sizes, float), np.asarray(times, float)
    scale = size.max()  # both columns near 1
    rows = np.stack([np.ones_like(size), size / scale], axis=1) * time.min() / time[:, None]
    (latency, slope), _ = nnls(rows, np.ones_like(time))
    if slope < ROUNDING * latency:
        slope = 0.0
    return float(latency * time.min()), float(slope * time.min() / scale)


def fits_of(rows: Sequence[CollectiveRow]) -> list[Fit]:
    """A fit for each implementation, kind and number of ranks that has at least `FEWEST` sizes."""
    groups: dict[tuple[str, str, int], list[CollectiveRow]] = {}
    for row in rows:
        groups.setdefault((row.implementation, row.kind, row.ranks), []).append(row)
    return [_fit(*key, group) for key, group in groups.items() if len({r.size for r in group}) >= FEWEST]


def _fit(implementation: str, kind: str, ranks: int, rows: list[CollectiveRow]) -> Fit:
    times_s = [row.time_us / 1e6 for row in rows]
    latency_s, per_byte_s = fit_line([row.size for row in rows], times_s)
    distances = (
        abs(latency_s + row.size * per_byte_s - time_s) / time_s
        for row, time_s in zip(rows, times_s, strict=True)
    )
    return Fit(
        implementation=implementation,
        kind=kind,
        ranks=ranks,
        latency_us=latency_s * 1e6,
        bandwidth_gb_s=1 / per_byte_s / 1e9 if per_byte_s else UNSET,
        misfit=statistics.median(distances),
    )
