"""The program `shardpair`. It stands outside of `compare`, which another module of this name may hide."""

import sys

from torchpar import require_compare


def main() -> None:
    """Run the command line. Exits with code 2 if another module hides the package `compare`."""
    try:
        require_compare()
    except ImportError as error:
        print(f"shardpair: error: {error}", file=sys.stderr)
        sys.exit(2)
    from compare.__main__ import main as run

    run()


if __name__ == "__main__":
    main()
