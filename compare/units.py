"""Numbers as people read them."""


def human_bytes(count: float) -> str:
    """Bytes in decimal units, three significant digits: 1.23 MB is 1.23e6 bytes."""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} EB"
