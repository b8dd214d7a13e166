"""Numbers as people read them."""

import math


def human_bytes(count: float) -> str:
    """Bytes in decimal units, three significant digits: 1.23 MB is 1.23e6 bytes."""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if abs(count) < 999.5:  # what rounds to 1000 belongs to the next unit
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} EB"


def human_seconds(seconds: float) -> str:
    """A span of time to the precision that matters: 4.2 s, 31 s, 2 min 5 s, 1 h 12 min."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min"


def human_days(seconds: float) -> str:
    """A span of time in one unit, for a list: 45 min, 7 h, 12 days."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def error_text(error: float) -> str:
    """A relative error; in words where there is none to give."""
    if not math.isfinite(error):
        return "differs"
    return "exact" if error == 0 else f"{error:.1e}"
