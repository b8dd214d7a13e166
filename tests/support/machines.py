"""Machines made by hand, on which all is free that a test does not name."""

from compare.plan.machine import LinkSpeed, Machine

FREE = 1e30


def machine_of(devices: int, **fields) -> Machine:
    """A machine on which all is free that the test does not name."""
    free = LinkSpeed(bytes_per_s=FREE)
    given = {"platform": "gpu", "devices_inside": devices, "memory_bytes": 1e12, "memory_bytes_per_s": FREE}
    given |= {"peak": {"float64": FREE}, "products": [(1, 1.0)], "inside": free, "across": free}
    return Machine(name="test", devices=devices, **{**given, **fields})
