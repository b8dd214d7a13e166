"""Files of a run: written whole or not at all, and a full disk said in words."""

import errno
import os
import threading
from pathlib import Path

_NO_ROOM = {
    errno.ENOSPC: "no space left on the device: make room, and run again",
    errno.EDQUOT: "the disk quota is used up: make room, and run again",
    errno.EFBIG: "a file would be larger than this process may write: raise ulimit -f, and run again",
}


def no_room(error: BaseException, folder: Path | None = None) -> str:
    """One line if the error is that `folder`, or the file that it names, has no room; else ''."""
    if not isinstance(error, OSError) or error.errno not in _NO_ROOM:
        return ""
    where = error.filename or folder
    return f"{where}: {_NO_ROOM[error.errno]}" if where else _NO_ROOM[error.errno]


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path` through a temporary name: no reader sees half a file, and none is left."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_native_id()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def why_not_readable(path: Path) -> str:
    """The reason why a path of the user cannot be read as a file, in words that follow it; '' if it can."""
    if os.path.isdir(path):
        return "is a folder, not a file"
    if not os.path.isfile(path):  # a pipe would hang whoever opens it
        return "is not a file" if os.path.exists(path) else "does not exist"
    return "" if os.access(path, os.R_OK) else "may not be read (permission denied)"
