"""The program `shardpair`. Its first import finds another module that hides the package `compare`."""

import sys


def main() -> None:
    """Run the command line. Exits with code 2 if another module hides the package `compare`."""
    try:
        import torchpar  # noqa: F401 (imports no PyTorch)
    except ImportError as error:
        print(f"shardpair: error: {error}", file=sys.stderr)
        sys.exit(2)
    from compare.__main__ import main as run

    run()


if __name__ == "__main__":
    main()
