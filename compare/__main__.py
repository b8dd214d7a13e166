"""`python -m compare`, the same as `shardpair`."""

import signal
import sys

from compare import cli
from compare.side.ending import StopRequest


def main() -> None:
    """The console command. SIGTERM ends it as Ctrl-C does; SIGUSR1 asks it to end, and it asks its engine."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    StopRequest.listen()
    sys.exit(cli.main())


if __name__ == "__main__":
    main()
