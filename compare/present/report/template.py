"""Templates of pages: one self-contained file, nothing fetched, everything escaped."""

import re

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape


def render_page(template: str, **values: object) -> str:
    """Fill a template of this folder. Raises jinja2.UndefinedError for a value that it lacks."""
    environment = Environment(
        loader=PackageLoader("compare.present.report", package_path=""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = _breakable
    return environment.get_template(template).render(**values)


def _breakable(text: str) -> Markup:
    """Text whose names and paths may be broken: `blocks.0.` `attention.` `qkv.` `bias`, `a/` `b_` `c`."""
    return Markup(re.sub(r"(?<=[./_])(?=[a-z])", "<wbr>", str(escape(text))))
