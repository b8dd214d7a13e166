"""The page of findings: one file that fetches nothing; and what a command leaves of them."""

from pathlib import Path

from compare.host.disk import write_atomically
from compare.present.report.template import render_page
from compare.present.tables import by_reason
from compare.show.findings import Figure, Findings, Picture
from compare.show.pages import leave_page
from compare.show.terminal import print_findings


def show(findings: Findings, folder: Path, *, page: str, picture: Path | None, as_json: bool) -> int:
    """Print findings, and leave their page and their picture.

    Args:
        findings: of a study.
        folder: of its results.
        page: name of the page in it, such as `bench.html`.
        picture: a file for all figures; None for none.
        as_json: print one JSON object instead of tables.

    Returns:
        The exit code: 0 if they passed, else 1.
    """
    print_findings(findings, as_json=as_json)

    def draw() -> Path:
        if picture and findings.figures:
            from compare.show.figures import save_figures  # matplotlib takes 2 s to import

            save_figures(picture, findings.figures, title=findings.title)
        return write_page(folder / page, findings)

    if findings.tables:
        leave_page(draw, label="page", as_json=as_json)
    return 0 if findings.passed else 1


def write_page(path: Path, findings: Findings) -> Path:
    """Write the page. Returns its path."""
    pictures = [*findings.drawn(), *map(_picture, findings.figures)]
    page = render_page(
        "findings.html",
        findings=findings,
        grid=[picture for picture in pictures if not picture.is_wide],
        wide=[picture for picture in pictures if picture.is_wide],
        left_out=by_reason(findings.left_out),
    )
    write_atomically(path, page.encode())
    return path


def _picture(figure: Figure) -> Picture:
    from compare.show.figures import svg_of

    return Picture(figure.title, svg_of(figure), figure.caption, is_wide=not figure.is_narrow)
