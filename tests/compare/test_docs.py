"""README.md and docs: tables of the code are current, commands are there, links lead somewhere."""

import re
from pathlib import Path

import make_docs
import pytest

from compare.cli import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
LINK = re.compile(r"\[[^]]*\]\(([^)#]*)(?:#([^)]*))?\)")


@pytest.mark.parametrize("path", make_docs.PAGES, ids=lambda path: path.name)
def test_generated_page_is_current(path):
    assert path.read_text() == make_docs.PAGES[path](), "run make docs"


def test_mentioned_commands_exist():
    for page, text in PAGES.items():
        for word in re.findall(r"`shardpair ([a-z-]+)", text):
            assert word in COMMANDS, f"{page}: shardpair {word}"


def test_readme_names_every_command():
    missing = [word for word in COMMANDS if not re.search(rf"`{word}`", PAGES["README.md"])]
    assert missing == []


def anchors(page: str) -> list[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def dead_links(page: str, text: str) -> list[str]:
    """Links of a page to a file or an anchor that is not there."""
    dead = []
    for link, anchor in LINK.findall(text):
        target = (ROOT / page).parent / link if link else ROOT / page
        if "://" not in link and not (
            target.exists() and (not anchor or anchor in anchors(target.read_text()))
        ):
            dead.append(f"{page}: {link}#{anchor}")
    return dead


def test_links_lead_somewhere():
    assert [link for page, text in PAGES.items() for link in dead_links(page, text)] == []
    assert len(dead_links("README.md", "[a](nosuch.md), [b](README.md#nosuch), [c](README.md)")) == 2
