"""`python -m compare`, the same as `shardpair`."""

import sys

from compare import cli


def main() -> None:
    """The console command."""
    sys.exit(cli.main())


if __name__ == "__main__":
    main()
