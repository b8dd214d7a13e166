"""A check of a file that a user named, before it is opened: opening a pipe would hang."""

import os
from pathlib import Path


def why_not_readable(path: Path) -> str:
    """The reason why `path` cannot be read as a file, in words that follow its name; '' if it can."""
    if os.path.isdir(path):
        return "is a folder, not a file"
    if not os.path.isfile(path):
        return "is not a file" if os.path.exists(path) else "does not exist"
    return "" if os.access(path, os.R_OK) else "may not be read (permission denied)"
