"""Latency and bandwidth of a collective, fitted to its times: time = latency + size / bandwidth."""

import statistics
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from compare.side.collective_bench import CollectiveRow

ROUNDING = 1e-9
"""Share of the latency: a smaller growth over all sizes counts as none."""
FEWEST = 3
"""Sizes below which a line says nothing."""


class Fit(Struct, frozen=True):
    """A line through the times of one implementation of one collective on so many ranks."""

    implementation: str
    kind: str
    ranks: int
    latency_us: float
    """Time of a call beyond its bytes."""
    misfit: float
    """Median distance of a measured time from the line, as a fraction of it."""
    bandwidth_gb_s: float | None = None
    """1e9 bytes of `size` a second, as algbw; None where time does not grow with size."""


def fit_line(sizes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """Latency (s) and seconds a byte of t = latency + size * s, neither negative, by weighted least squares.

    Each time counts with its relative error, so that a kilobyte weighs as much as a gigabyte.
    """
    from scipy.optimize import nnls  # half a second to import

    size, time = np.asarray(sizes, float), np.asarray(times, float)
    scale = size.max()  # both columns near 1
    rows = np.stack([np.ones_like(size), size / scale], axis=1) * time.min() / time[:, None]
    (latency, slope), _ = nnls(rows, np.ones_like(time))
    slope *= slope >= ROUNDING * latency
    return float(latency * time.min()), float(slope * time.min() / scale)


def fits_of(rows: Sequence[CollectiveRow]) -> list[Fit]:
    """A fit for each implementation, kind and number of ranks that has at least `FEWEST` sizes."""
    groups: dict[tuple[str, str, int], list[tuple[int, float]]] = {}
    for row in rows:
        key = row.implementation, row.kind, row.ranks
        groups.setdefault(key, []).append((row.size, row.time_us / 1e6))
    fits = []
    for key, pairs in groups.items():
        if len({size for size, _ in pairs}) < FEWEST:
            continue
        latency_s, per_byte_s = fit_line(*zip(*pairs, strict=True))
        off = [abs(latency_s + size * per_byte_s - time_s) / time_s for size, time_s in pairs]
        bandwidth = 1 / per_byte_s / 1e9 if per_byte_s else None
        fits.append(Fit(*key, latency_s * 1e6, statistics.median(off), bandwidth))
    return fits
