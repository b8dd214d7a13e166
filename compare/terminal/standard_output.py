"""Standard output whose reader has left, or whose disk is full. It needs the standard library alone."""

import os
import sys
from typing import IO

NAME = "standard output"


def discard(file: IO[str] | None = None) -> None:
    """Send what is still to be written to a file (standard output by default) nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, (file or sys.stdout).fileno())
    os.close(nowhere)


def flush() -> OSError | None:
    """Write out what is buffered, here and not when Python ends, where a failure would be a traceback.

    Returns:
        Why it could not be written, after discarding it; None if it was, or if its reader has left.
    """
    try:
        if sys.stdout is not None:  # None where it is closed: `shardpair ... >&-`
            sys.stdout.flush()
    except BrokenPipeError:
        discard()
    except OSError as error:
        discard()
        return error
    return None
