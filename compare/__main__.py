"""`python -m compare`, the same as `shardpair`."""

import signal
import sys

from compare import cli


def main() -> None:
    """The console command. SIGTERM ends it as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(cli.main())


if __name__ == "__main__":
    main()
