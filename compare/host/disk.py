"""Files of a run: written whole or not at all, no remains, and a full disk said in words."""

import contextlib
import errno
import os
import threading
from collections.abc import Generator
from pathlib import Path

_NO_ROOM = {
    errno.ENOSPC: "no space left on the device: make room, and run again",
    errno.EDQUOT: "the disk quota is used up: make room, and run again",
    errno.EFBIG: "a file would be larger than this process may write: raise ulimit -f, and run again",
}


class DiskFull(OSError):
    """There is no room for what a run writes. The message is one line that names the folder."""


@contextlib.contextmanager
def full_disk_named(folder: Path) -> Generator[None]:
    """Turn what the system says of a full disk, or quota, into DiskFull, which names `folder`."""
    try:
        yield
    except OSError as error:
        if message := no_room(error, folder):
            raise DiskFull(message) from error
        raise


def no_room(error: BaseException, folder: Path) -> str:
    """One line if the error is that `folder`, or what it wrote to, has no room; else ''."""
    if isinstance(error, DiskFull):
        return str(error)
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return f"{error.filename or folder}: {_NO_ROOM[error.errno]}"
    return ""


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path` through a temporary name, so that no reader ever sees half a file.

    Raises DiskFull: there is no room. Nothing is left behind.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_native_id()}.tmp")
    with full_disk_named(path.parent):
        try:
            temporary.write_bytes(content)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def remove_leftovers(folder: Path) -> None:
    """Remove temporary names that a killed process left. No other process may be writing there."""
    for path in folder.glob("*.tmp"):
        with contextlib.suppress(OSError):
            path.unlink()


def why_not_readable(path: Path) -> str:
    """The reason why a path of the user cannot be read as a file, in words that follow it; '' if it can."""
    if os.path.isdir(path):
        return "is a folder, not a file"
    if not os.path.isfile(path):  # a pipe would hang whoever opens it
        return "is not a file" if os.path.exists(path) else "does not exist"
    return "" if os.access(path, os.R_OK) else "may not be read (permission denied)"
