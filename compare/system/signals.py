"""Signals that must have their effect at once, those that stay ignored, and the end of a process in words."""

import os
import signal
import threading
from collections.abc import Callable, Collection


def is_ignored(number: int) -> bool:
    """True if this process was started with the signal ignored, which is then left so.

    A script's background job (`shardpair run &`, `nohup`) ignores SIGINT: Ctrl-C is for the foreground.
    """
    return signal.getsignal(number) is signal.SIG_IGN


def on_signals(numbers: Collection[int], act: Callable[[int], None]) -> None:
    """Call `act(number)` in a thread as soon as such a signal comes; call this from the main thread.

    A handler of Python's own would wait until the main thread comes back from native code, which a
    compilation or a collective does not do soon. Signals that are ignored stay ignored.
    """
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    taken = {number for number in numbers if not is_ignored(number)}
    for number in taken:
        signal.signal(number, lambda number, frame: None)  # so that the byte is written, and nothing else

    def wait() -> None:
        while arrived := os.read(receiver, 1):
            if arrived[0] in taken:
                act(arrived[0])

    threading.Thread(target=wait, daemon=True).start()


def when_stdin_ends(act: Callable[[], None]) -> None:
    """Call `act` in a thread once no process holds standard input open any more: who started us is gone."""

    def wait() -> None:
        while os.read(0, 4096):  # not sys.stdin, whose lock may be held in a fork, or at the end of Python
            pass
        act()

    threading.Thread(target=wait, daemon=True).start()


def describe_exit(code: int, *, when: str = "") -> str:
    """The end of a process in words: 'killed by SIGSEGV at step 3', where `when` is 'at step 3'.

    Its code is negative for a signal, as `subprocess` gives it; 128 + n stands for signal n, as in a shell.
    """
    when = when and f" {when}"
    number = -code if code < 0 else code - 128
    if not 0 < number < signal.NSIG:
        return f"left with exit code {code}{when}"
    known = number in {*signal.Signals}
    name = signal.Signals(number).name if known else f"signal {number}"
    if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        return f"ended by {name}{when}"
    return f"killed by {name}{when}" + " (out of memory, if nobody sent it)" * (number == signal.SIGKILL)
