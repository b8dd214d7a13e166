"""Signal handlers that run at once, the end of standard input, and descriptions of exit codes."""

import os
import signal
import threading
from collections.abc import Callable, Collection


def is_ignored(number: int) -> bool:
    """True if a signal is ignored, and so shall stay ignored.

    A script's background job (`shardpair run &`, `nohup`) ignores SIGINT: Ctrl-C is for the foreground.
    """
    return signal.getsignal(number) is signal.SIG_IGN


def on_signals(numbers: Collection[int], act: Callable[[int], None]) -> None:
    """Call `act(number)` in a thread as soon as a signal comes. Call this in the main thread.

    A handler of Python itself would wait until the main thread returns from native code, such as a
    compilation or a collective. Ignored signals stay ignored.
    """
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    taken = {number for number in numbers if not is_ignored(number)}
    for number in taken:
        signal.signal(number, lambda number, frame: None)  # only writes the byte

    def wait() -> None:
        while arrived := os.read(receiver, 1):
            if arrived[0] in taken:
                act(arrived[0])

    threading.Thread(target=wait, daemon=True).start()


def when_stdin_ends(act: Callable[[], None]) -> None:
    """Call `act` in a thread when standard input ends: the process that started this one has ended."""

    def wait() -> None:
        while os.read(0, 4096):  # sys.stdin has a lock, which a fork or the end of Python may keep
            pass
        act()

    threading.Thread(target=wait, daemon=True).start()


def describe_exit(code: int, *, when: str = "") -> str:
    """The end of a process as a participle clause, such as 'killed by SIGSEGV at step 3' with `when`.

    `code` is -n for signal n, as in `subprocess`, or 128 + n, as in a shell.
    """
    when = when and f" {when}"
    number = -code if code < 0 else code - 128
    if not 0 < number < signal.NSIG:
        return f"left with exit code {code}{when}"
    known = number in {*signal.Signals}
    name = signal.Signals(number).name if known else f"signal {number}"
    if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        return f"ended by {name}{when}"
    if number == signal.SIGUSR1:
        return f"stopped as asked ({name}){when}"
    cause = {"SIGKILL": "out of memory", "SIGBUS": "a data file became shorter, or a full disk"}.get(name)
    return f"killed by {name}{when}" + (f" (perhaps {cause})" if cause else "")
