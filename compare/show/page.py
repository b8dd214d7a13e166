"""The page of findings: one file that fetches nothing, with everything escaped."""

from collections.abc import Callable
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from compare.host.disk import write_atomically
from compare.host.tensors import RecordError
from compare.show.figures import svg
from compare.show.findings import Findings, by_reason
from compare.spec.experiment import ExperimentError
from compare.terminal import errors_console, results_console


def write_page(path: Path, findings: Findings, *, template: str = "page.html", **values: object) -> Path:
    """Write the page, of `page.html` or of what extends it with more values. Returns its path."""
    environment = Environment(
        loader=PackageLoader("compare.show", package_path=""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template(template)
    text = page.render(findings=findings, svg=svg, by_reason=by_reason, **values)
    write_atomically(path, text.encode())
    return path


def leave_page(draw: Callable[[], Path], *, as_json: bool, label: str = "report") -> None:
    """Draw, and say on stdout where the page is; of one that cannot be drawn say why, on stderr.

    Raises:
        ExperimentError, RecordError, OSError: bad input or a full disk, which are no matter of drawing.
    """
    try:
        page = draw()
    except (ExperimentError, RecordError, OSError):
        raise
    except Exception as error:  # fonts, a user's plugins: nothing of it changes a verdict
        why = " ".join(f"{type(error).__name__}: {error}".split())
        words = f"no page: it could not be drawn ({why}); the result stands"
        errors_console().print(words, style="yellow")
        return
    if not as_json:
        results_console().print(f"{label}: {page}", soft_wrap=True)
