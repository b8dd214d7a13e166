"""The cut of a flat tensor over ranks: one rule, for collectives, shards and the record."""


def chunk_slices(count: int, ranks: int) -> list[slice]:
    """The cut of each rank of `count` elements: equal but for the last ones, which may be short or empty.

    >>> chunk_slices(10, 4)
    [slice(0, 3, None), slice(3, 6, None), slice(6, 9, None), slice(9, 10, None)]
    """
    share = -(-count // ranks)
    return [slice(min(r * share, count), min((r + 1) * share, count)) for r in range(ranks)]
