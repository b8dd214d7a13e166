"""`make docs`: write the generated numbers and tables into README.md and docs/*.md.

They stand between `<!-- generated: NAME -->` and `<!-- end -->`, on lines of their own for a table, inside
of a sentence for a number. NAME is a key of `tables.SECTIONS`. With --check nothing is written: the exit code
is 1 if a page is stale.
"""

import re
import sys
from pathlib import Path

from tables import SECTIONS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md"))]
MARKED = re.compile(r"<!-- generated: (?P<name>[\w-]+) -->(?P<text>.*?)<!-- end -->", re.DOTALL)


def renewed(page: str) -> str:
    """The page with every generated section as it is now. Raises KeyError for an unknown name."""

    def renew(found: re.Match[str]) -> str:
        around = "\n" if found["text"].startswith("\n") else ""  # a table, not a number in a sentence
        return f"<!-- generated: {found['name']} -->{around}{SECTIONS[found['name']]()}{around}<!-- end -->"

    return MARKED.sub(renew, page)


def stale_pages() -> list[Path]:
    """Pages that `make docs` would change."""
    return [path for path in PAGES if renewed(text := path.read_text(encoding="utf-8")) != text]


def main() -> int:
    """Write the pages, or say which are stale. Returns the exit code."""
    stale = stale_pages()
    for path in stale:
        if "--check" in sys.argv[1:]:
            print(f"{path.relative_to(ROOT)} is stale: run make docs")
        else:
            path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return 1 if stale and "--check" in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
