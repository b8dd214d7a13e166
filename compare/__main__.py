"""`python -m compare`, the same as `shardpair`.

Imports nothing but the standard library at first: Ctrl-C while the rest is imported, which takes a second,
must not be a traceback. (Python puts the current folder first on its path for `python -m`; for `shardpair`
it does not.)
"""

import os
import signal
import sys
from types import FrameType

from compare.terminal import standard_output

INTERRUPTED = 130


def main() -> None:
    """The console command."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # and not ignored, as it is behind nohup
        signal.signal(signal.SIGINT, _end_at_once)
    from compare.cli import main as run

    signal.signal(signal.SIGINT, handler)
    code: object = 1
    try:
        code = run()
    except SystemExit as ended:  # help, or a malformed flag
        code = ended.code
    if unwritten := standard_output.flush():
        sys.stderr.write(f"shardpair: error: {standard_output.NAME}: {unwritten.strerror}\n")
        code = code or 1
    sys.exit(code)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    """Not an exception: that would go through the imports of C extensions, which turn it into others."""
    os.write(2, b"shardpair: interrupted\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
