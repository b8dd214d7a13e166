"""Plain English in docstrings, comments, messages and pages: the rules that regular expressions can check."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("compare", "jaxpar", "torchpar", "tests", "docs")
LONGEST = 25
"""Words of a sentence or clause."""
START = re.compile(r"^(Of|What|That|Those|The same|Whose|Which|Nobody|As of|Searched|Refused)\b")
PHRASES = re.compile(
    r"\b(held|anew|so many|but for|as far as|without a word|nobody|unasked|whatever|beside"
    r"|says?|said|tells?|told|untold|those of|that of|is no|are no|was no"
    r"|a (?:line|word|file|case|rank) each|one after the other|otherwise than"
    r"|com(?:es?|ing) home|go(?:es)? round|hand(?:s|ed)? out|shar(?:es?|ed) out|dealt? out)\b",
    re.IGNORECASE,
)
SENTENCE = re.compile(r"(?<=[.!?] )(Of|What|That of|Those|Nobody|Searched|Refused)\b")
MESSAGE = re.compile(r"\w+ \w+ \w+ \w+")
"""A string constant with four words in a row is prose: a message, a help text, a caption."""


def paragraphs(text: str) -> list[str]:
    """Paragraphs and list items, each on one line, without code."""
    text = re.sub(r"```.*?```|^ *\|.*?$|^    .*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*#]|\d+\.) )", re.sub(r"`[^`]*`|\]\([^)]*\)", "X", text))
    return [" ".join(block.split()).lstrip("-*#0123456789. ") for block in blocks]


def prose_of_code(source: str) -> Iterator[tuple[int, str, bool]]:
    """(line, paragraph, whether it opens a docstring) of docstrings, comments and messages."""
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings.add(id(node.value))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) in docstrings:
                found = paragraphs(ast.literal_eval(repr(node.value)))
                yield from ((node.lineno, paragraph, place == 0) for place, paragraph in enumerate(found))
            elif MESSAGE.search(node.value):
                yield node.lineno, " ".join(node.value.split()), False
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#: "), False


def faults(paragraph: str, *, opens: bool = False) -> Iterator[str]:
    """Rules that a paragraph breaks, with the words."""
    if opens and (match := START.search(paragraph)):
        yield f"starts with {match[0]!r}"
    yield from (f"{match[0]!r}" for match in PHRASES.finditer(paragraph))
    yield from (f"a sentence starts with {match[0]!r}" for match in SENTENCE.finditer(paragraph))
    for sentence in re.split(r"(?<=[.:;!?]) ", paragraph):
        if (count := len(sentence.split())) > LONGEST:
            yield f"{count} words: {sentence[:60]!r}"


def faults_of_file(path: Path) -> list[str]:
    """Broken rules of a file, each with its place."""
    text = path.read_text()
    name = path.relative_to(ROOT)
    if path.suffix == ".py":
        prose = prose_of_code(text)
    else:
        prose = ((0, paragraph, False) for paragraph in paragraphs(text))
    return [f"{name}:{line}: {fault}" for line, text, opens in prose for fault in faults(text, opens=opens)]


def files(folder: str) -> list[Path]:
    """Python files and pages of a folder; generated pages come from checked strings."""
    found = [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.md")]
    return [
        path for path in sorted(found) if path.parent.name != "generated" and path.name != Path(__file__).name
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_prose_is_plain(folder):
    assert [fault for path in files(folder) for fault in faults_of_file(path)] == []


def test_readme_is_plain():
    assert faults_of_file(ROOT / "README.md") == []


@pytest.mark.parametrize(
    "text",
    [
        "Of each place, the slots.",
        "A record is held against its request.",
        "It returns. What remains is rounding.",
        "Words of a sentence " * 7,
    ],
)
def test_broken_rule_is_found(text):
    assert list(faults(text, opens=True))
