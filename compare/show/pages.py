"""Pages and pictures, drawn when the verdict is printed: one that cannot be drawn costs no verdict."""

from collections.abc import Callable
from pathlib import Path

from compare.host.tensors import RecordError
from compare.spec.experiment import ExperimentError
from compare.terminal import errors_console, results_console


def leave_page(draw: Callable[[], Path], *, as_json: bool, label: str = "report") -> None:
    """Draw, and say on stdout where the page is; of one that cannot be drawn say why, on stderr.

    Args:
        draw: writes the page and returns its path.
        as_json: say nothing of the path.
        label: what the page is.

    Raises:
        ExperimentError, RecordError, OSError: bad input or a full disk, which are no matter of drawing.
    """
    try:
        page = draw()
    except (ExperimentError, RecordError, OSError):
        raise
    except Exception as error:  # fonts, templates, a user's plugins: nothing of it changes a verdict
        why = " ".join(f"{type(error).__name__}: {error}".split())
        said = f"no page: it could not be drawn ({why}); the result stands"
        errors_console().print(said, style="yellow")
        return
    if not as_json:
        results_console().print(f"{label}: {page}", soft_wrap=True)
