"""The C library's use of the host memory that tensors free."""

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
_NEVER = 2**31 - 1  # the largest threshold that an int holds


def keep_freed_memory() -> None:
    """Have glibc keep freed memory for later tensors, instead of returning it to the system.

    Every step allocates the same activations and gradients. The system clears each returned page again, which
    takes a fifth of a step's CPU time. MALLOC_ variables of the user have precedence.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt:
        mallopt(_M_MMAP_MAX, 0)  # large blocks come from the heap, too
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
