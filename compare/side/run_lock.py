"""A lock on the folder of a run: one run at a time.

It is a kernel lock (`flock`) on the folder itself. It needs no file, and ends with the last process of its
holder: forked ranks inherit it, a started program does not.
"""

import contextlib
import fcntl
import os
import sys
from collections.abc import Generator
from pathlib import Path

from compare.spec.experiment import ExperimentError


@contextlib.contextmanager
def lock_folder(folder: Path) -> Generator[None]:
    """Lock `folder` until the block ends. A file system without locks, such as NFS, gets a warning instead.

    Raises ExperimentError at once: another run has the lock, or there is no such folder.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ExperimentError(f"{folder}: {error.strerror}: give the folder of a run") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ExperimentError(
                f"{folder} is in use by another run: wait for its end, or take another folder"
            ) from None
        except OSError as error:
            no_locks = f"its file system has no locks ({error.strerror})"
            print(f"{folder}: {no_locks}: do not start a second run in it", file=sys.stderr)
        yield
    finally:
        os.close(descriptor)
