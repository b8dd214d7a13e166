"""`python -m compare.execute.local_hosts --hosts N --on_host K --folder RUN_DIR COMMAND`: hosts for a test.

All processes run on this machine; each believes to be on one of N hosts.
"""

import argparse
import sys
from pathlib import Path

from compare.execute.hosts import start_together


def main() -> int:
    """Run them. Returns the exit code of the first that failed."""
    parser = argparse.ArgumentParser(prog="python -m compare.execute.local_hosts")
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--on_host", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="of the run, for error.json")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    return start_together(given.hosts, given.on_host, given.command, given.folder)


if __name__ == "__main__":
    sys.exit(main())
