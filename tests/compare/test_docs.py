"""README.md and docs: generated sections are current, commands and links exist, names are in the code."""

import re
from pathlib import Path

import make_docs
import pytest
from proofs import errors_of
from tables import SECTIONS

from compare.cli import COMMANDS
from compare.spec.engines.registry import STUDIED
from compare.studies.faults import FAULTS

ROOT = Path(__file__).parents[2]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in make_docs.PAGES}
LINK = re.compile(r"\[[^]]*\]\(([^)#]*)(?:#([^)]*))?\)")
SHARED = ("host", "spec", "numerics", "pipeline", "checkpoint", "contract")
PACKAGES = (tuple(f"compare/{room}" for room in SHARED), ("jaxpar",), ("torchpar",))


@pytest.mark.parametrize("page", PAGES)
def test_generated_sections_are_current(page):
    assert make_docs.renewed(PAGES[page]) == PAGES[page], f"{page} is stale: run make docs"


def test_every_section_is_on_a_page():
    used = {found["name"] for page in PAGES.values() for found in make_docs.MARKED.finditer(page)}
    assert used == set(SECTIONS)


def test_a_stale_number_is_noticed():
    fresh = "There are <!-- generated: faults-count -->{}<!-- end --> faults."
    count = SECTIONS["faults-count"]()
    assert make_docs.renewed(fresh.format("7")) == fresh.format(count)
    table = f"<!-- generated: commands -->\n{SECTIONS['commands']()}\n<!-- end -->"
    assert make_docs.renewed("<!-- generated: commands -->\n<!-- end -->") == table
    with pytest.raises(KeyError, match="nosuch"):
        make_docs.renewed("<!-- generated: nosuch --><!-- end -->")


def test_the_ledgers_summary_counts_every_line():
    cells = [line.split("|")[3:6] for line in SECTIONS["ledger-summary"]().splitlines()[2:]]
    equal, by_pattern, unexplained = (sum(map(int, column)) for column in zip(*cells, strict=True))
    lines = equal + by_pattern + unexplained
    assert f"{equal} of {lines} lines are the closed form's" in PAGES["docs/generated/ledger.md"]


def test_every_planted_fault_was_measured():
    wanted = {
        f"{fault}.{name}"
        for fault in FAULTS
        for name, engine in STUDIED.items()
        if fault not in engine.impossible_faults
    }
    assert set(errors_of("faults")) == wanted, "run make measure"


def test_markers_are_closed():
    for page, text in PAGES.items():
        assert text.count("<!-- generated:") == len(make_docs.MARKED.findall(text)), page
        assert text.count("<!-- end -->") == len(make_docs.MARKED.findall(text)), page


def test_commands_that_are_spoken_of_are_there():
    for page, text in PAGES.items():
        for word in re.findall(r"`shardpair ([a-z-]+)`", text):
            assert word in (*COMMANDS, "--version"), page


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for link, anchor in LINK.findall(PAGES[page]):
        if "://" not in link:
            target = (ROOT / page).parent / link if link else ROOT / page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target.read_text()), f"{link}#{anchor}"


def anchors(page: str) -> list[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_a_dead_anchor_is_noticed():
    assert anchors("# Why a cell is -\n## What is sent, and why\n") == [
        "why-a-cell-is--",
        "what-is-sent-and-why",
    ]


def test_names_in_the_glossary_are_in_the_code():
    sources = [
        "\n".join(path.read_text() for package in column for path in sorted((ROOT / package).rglob("*.py")))
        for column in PACKAGES
    ]
    rows = [line.split("|")[1:-1] for line in PAGES["docs/glossary.md"].splitlines() if line.startswith("| ")]
    assert len(rows) > 30
    gone = [
        f"{row[0].strip()}: {name} is not in {column}"
        for row in rows
        for column, source, cell in zip(PACKAGES, sources, row[2:], strict=True)
        for name in re.findall(r"`([^`]+)`", cell)
        if row[0].strip() != "word" and not re.search(rf"\b{re.escape(name)}\b", source)
    ]
    assert gone == []
