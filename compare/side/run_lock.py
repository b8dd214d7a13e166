"""The lock on a folder of results: one run at a time.

It is the kernel's own (`flock` on the folder itself), so that it leaves no file behind and is let go when the
last process of its holder has ended, however that ends: forked ranks inherit it, a started program does not.
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
    """Hold `folder` against every other run until the block ends; where it has no locks, as on NFS, say so.

    Raises ExperimentError: another run holds it, which is never waited for; or there is no such folder.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ExperimentError(f"{folder}: {error.strerror}: give the folder of a run") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            in_use = f"{folder} is in use by another run: wait for its end, or take another folder"
            raise ExperimentError(in_use) from None
        except OSError as error:
            no_locks = f"its file system has no locks ({error.strerror})"
            print(f"{folder}: {no_locks}: do not start a second run in it", file=sys.stderr)
        yield
    finally:
        os.close(descriptor)
