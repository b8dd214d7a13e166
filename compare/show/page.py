"""The page of findings: one file that fetches nothing, with everything escaped."""

from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from compare.show.figures import Figure, svg
from compare.show.findings import Findings, by_reason
from compare.spec.experiment import one_line
from compare.system.disk import write_atomically
from compare.terminal import errors_console, printable


def write_page(path: Path, findings: Findings, *, template: str = "page.html", **values: object) -> Path:
    """Write a page from `page.html`, or from a template that extends it with `values`. Returns its path."""
    write_atomically(path, _rendered(template, findings=findings, **values).encode())
    return path


def fragment(findings: Findings) -> str:
    """The sentence, the warnings and the tables of findings as HTML, for a notebook."""
    return _rendered("notebook.html", findings=findings)


def _rendered(template: str, **values: object) -> str:
    environment = Environment(
        loader=PackageLoader("compare.show", package_path=""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template(template).render(svg=_picture, by_reason=by_reason, **values)
    return printable(text, keep="\n")


def _picture(figure: Figure) -> Markup:
    """The figure as <svg>, or the reason why matplotlib cannot draw it."""
    try:
        return svg(figure)
    except Exception as error:
        why = f"{figure.title} cannot be drawn: {type(error).__name__}: {one_line(error)}"
        errors_console().print(why, style="yellow")
        return escape(why)
