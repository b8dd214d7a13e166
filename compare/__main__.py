"""`python -m compare`, the same as `shardpair`."""

import sys

from compare.cli import main as run


def main() -> None:
    """The console command."""
    sys.exit(run())


if __name__ == "__main__":
    main()
