"""A process and all that it started, from outside: whether they compute, and whether it is stopped."""

import psutil

from compare.host.activity import Activity


class ProcessTree:
    """Watches a process that may end at any moment.

    Args:
        pid: of the process at its root.
    """

    def __init__(self, pid: int):
        self._pid = pid
        self._activity = Activity(self._cpu_seconds)

    def is_busy(self) -> bool:
        """True if any of them used the processor since the last call."""
        return self._activity.is_busy()

    def is_stopped(self) -> bool:
        """True if the root is suspended: SIGSTOP, a debugger. Its children may go on."""
        try:
            return psutil.Process(self._pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        except psutil.NoSuchProcess:
            return False

    def _cpu_seconds(self) -> float:
        """CPU seconds of all living processes, and of their children that have ended."""
        try:
            root = psutil.Process(self._pid)
            members = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return 0.0
        total = 0.0
        for member in members:
            try:
                times = member.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system + times.children_user + times.children_system
        return total
