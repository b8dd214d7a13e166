"""Threads of gloo that leave the core to the thread that computes.

gloo moves its bytes in a thread of its own. When a socket has news, that thread tries the lock of the
connection, and if the lock is taken it asks the socket again, at once and without end. A rank that sends
holds the lock. The answer wakes gloo's thread, as likely as not on the rank's own core, and the kernel lets
who wakes up go first: gloo's thread then spins for its time slice, waiting for a lock whose owner waits for
the core. Of exchanges of 200 KB between two ranks this was most of the CPU time, and of the wall time.

A thread of the policy SCHED_BATCH does not go first when it wakes up: the rank finishes what it sends.
"""

import os
import warnings
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def yielding_threads() -> Generator[None]:
    """Make process groups in it: threads that are started within are of SCHED_BATCH.

        >>> with yielding_threads():
        ...     dist.init_process_group("gloo")

    Only Linux has such a policy. A caller whose own is not the usual one (SCHED_OTHER) hands that on as it
    is; if the system forbids the change, a warning says so.
    """
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    usual = os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, usual)
    except OSError as error:
        warnings.warn(f"gloo's messages will take more CPU time: SCHED_BATCH: {error}", stacklevel=3)
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, usual)
