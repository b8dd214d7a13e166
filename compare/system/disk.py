"""Files of a run: atomic writes, and the message of a full disk."""

import errno
import os
import threading
from pathlib import Path

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A full disk, a used quota, a limit of `ulimit -f`."""


def no_room(error: BaseException, folder: Path | None = None) -> str:
    """The message of an error that a disk is full; '' for any other error.

    It names the error's file, or else `folder`.
    """
    if not isinstance(error, OSError) or error.errno not in NO_ROOM:
        return ""
    where = error.filename or folder
    message = f"{os.strerror(error.errno)}: make room, and run again"
    return f"{where}: {message}" if where else message


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to a temporary file and rename it to `path`, so that no reader gets half a file.

    Raises OSError, which names `path`.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_native_id()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        temporary.unlink(missing_ok=True)


def why_not_readable(path: Path) -> str:
    """The reason why a path cannot be read as a file, as the predicate of a sentence; '' if it can."""
    if os.path.isdir(path):
        return "is a folder, not a file"
    if not os.path.isfile(path):  # to open a pipe would block
        return "is not a file" if os.path.exists(path) else "does not exist"
    return "" if os.access(path, os.R_OK) else "may not be read (permission denied)"
