"""Where results are printed."""

from rich.console import Console

PIPE_WIDTH = 160  # a table in a log should not be cut to the 80 columns that rich assumes there


def results_console() -> Console:
    """Standard output: as wide as the terminal, or wide enough for any table in a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def errors_console() -> Console:
    """Standard error, for lines that are not cut: they may quote anything, and are no markup."""
    return Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
