"""The order of a ring's work: products run between a hop's start and the wait for it."""

from compare.spec.experiment import Layout

HOP = "hpw"
"""A hop in the letters of `compare.contract.work.ObservedWork.rings`."""


def orders_of_ring(layout: Layout) -> set[str]:
    """The orders of all ranks, in forward and in backward, where each rank runs its own program."""
    orders, ranks = set[str](), layout.cp
    for rank in range(ranks):
        forward = backward = ""
        for hop in range(ranks):
            sends, waits = HOP[::2] if hop < ranks - 1 else ("", "")
            # The causal mask hides the keys of later ranks. With zigzag each rank sees a part of all.
            products = "p" if layout.zigzag or hop <= rank else ""
            forward += sends + products + waits
            backward += sends + products + ("v" if hop else "") + "g" + waits
        orders |= {forward, f"{backward}v"}
    return orders
