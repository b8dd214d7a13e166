"""The end of a process, in words: a signal, and whether the kernel wanted its memory."""

import re
import signal
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_POLITE = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def describe_exit(code: int, *, when: str = "", oom_kills_before: int | None = None) -> str:
    """The end of a process in words: 'killed by SIGKILL at step 3: out of memory, says the kernel'.

    Args:
        code: as `subprocess` gives it: negative for a signal. 128 + n stands for signal n, as in a shell.
        when: to be said after what happened: 'at step 3'.
        oom_kills_before: `oom_kills()` from when it started.
    """
    when = when and f" {when}"
    number = -code if code < 0 else code - 128
    if not 0 < number < signal.NSIG:
        return f"left with exit code {code}{when}"
    name = signal_name(number)
    if number in _POLITE:
        return f"ended by {name}{when}"
    if number != signal.SIGKILL:
        return f"killed by {name}{when}"
    now = oom_kills()
    if now is not None and oom_kills_before is not None and now > oom_kills_before:
        return f"killed by {name}{when}: out of memory, says the kernel"
    return f"killed by {name}{when} (out of memory, if nobody sent it)"


def signal_name(number: int) -> str:
    """SIGTERM for 15; 'signal 40' for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def oom_kills() -> int | None:
    """Number of processes of our cgroup that the kernel killed for memory; None if it does not say."""
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folders, name = (_CGROUPS, _CGROUPS / "unified"), "memory.events"
        elif "memory" in controllers.split(","):
            folders, name = (_CGROUPS / "memory",), "memory.oom_control"
        else:
            continue
        # A container sees its own cgroup at the top, under a path that need not exist in there.
        for folder in folders:
            for file in (folder / path.lstrip("/") / name, folder / name):
                if (count := _counted(file)) is not None:
                    return count
    return None


def _counted(file: Path) -> int | None:
    try:
        found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None
