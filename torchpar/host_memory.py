"""Memory of the host: what the C library does with what a tensor frees."""

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
_NEVER = 2**31 - 1  # the largest threshold that an int holds


def keep_freed_memory() -> None:
    """Have glibc keep freed memory for the tensors to come, instead of handing it back to the system.

    Every step allocates the same activations and gradients. Handed back, each page of them is faulted in and
    cleared again, which took a fifth of a step's CPU time. A user's own MALLOC_ settings are left alone, and
    other C libraries do as they do.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(_M_MMAP_MAX, 0)  # large ones too come from the heap
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
