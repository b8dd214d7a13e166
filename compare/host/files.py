"""A check of a file that a user named, before it is opened: opening a FIFO would hang."""

import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFDIR: "is a folder",
    stat.S_IFIFO: "is a named pipe (FIFO)",
    stat.S_IFCHR: "is a device",
    stat.S_IFBLK: "is a device",
    stat.S_IFSOCK: "is a socket",
}


def why_not_readable(path: Path) -> str:
    """The reason why `path` cannot be read as a file, in words that follow its name; '' if it can."""
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except FileNotFoundError:
        return "is a link to nothing" if path.is_symlink() else "does not exist"
    except NotADirectoryError:
        return "does not exist: a part of this path is a file"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except ValueError:  # a null character, which TOML can write
        return "is not a path"
    if kind != stat.S_IFREG:
        return f"{_KINDS.get(kind, 'is no file')}, not a file"
    if not os.access(path, os.R_OK):
        return "may not be read (permission denied)"
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:  # some of /proc, a stale mount: an error of reading would name no file
        return f"cannot be read ({error.strerror})"
    return ""
