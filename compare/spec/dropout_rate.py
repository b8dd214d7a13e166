"""The rate of dropout as the elements' random bits express it: a multiple of 2^-16."""

BITS = 16
"""Random bits of an element."""
LANES = 4
"""Elements that share one counter: its 64 random bits are cut into so many parts."""


def threshold(rate: float) -> int:
    """The number below which an element's 16 bits drop it."""
    return round(rate * 2**BITS)
