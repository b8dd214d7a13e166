"""`python -m compare`, the same as `shardpair`."""

import signal
import sys


def main() -> None:
    """The console command. SIGTERM ends it as Ctrl-C does; SIGUSR1 asks it to end, and it asks its engine."""
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        from compare import cli  # takes most of a second, in which Ctrl-C may come
        from compare.side.ending import StopRequest

        StopRequest.listen()
        code = cli.main()
    except KeyboardInterrupt:
        print("shardpair: error: interrupted; nothing had started", file=sys.stderr)
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
