"""The page of findings: one file that fetches nothing, with everything escaped."""

from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from compare.host.disk import write_atomically
from compare.show.figures import svg
from compare.show.findings import Findings, by_reason
from compare.terminal import printable


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
    write_atomically(path, printable(text, keep="\n").encode())
    return path
