"""Outlines of pages, and what every page promises."""

import re
from collections import Counter
from html.parser import HTMLParser


class Outline(HTMLParser):
    """Outline of a page: its tags, the text of its cells, the names of its pictures."""

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.cells, self.pictures = Counter(), [], []
        self.headers_without_scope = self.boxes_without_name = 0
        self.ids = Counter()
        self._text = None
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags[tag] += 1
        self.ids.update([attributes["id"]] if "id" in attributes else [])
        if tag in ("td", "th"):
            self._text = ""
        self.headers_without_scope += tag == "th" and not attributes.get("scope")
        self.boxes_without_name += attributes.get("class") == "wide" and not attributes.get("aria-label")
        if tag == "svg":
            assert attributes["role"] == "img"
            self.pictures.append(attributes["aria-label"])

    def handle_data(self, data):
        if self._text is not None:
            self._text += data

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.cells.append(self._text.strip())
            self._text = None


def require_alone(page: str) -> Outline:
    """Hold a page to what all promise; its outline.

    It fetches nothing, runs nothing, has both grounds; links lead to places in it, ids are unique; every
    cell, picture and box says something to those who cannot see it.
    """
    assert not re.search(r"\bsrc=|@import|url\((?!#)|<link|<script", page)
    assert "prefers-color-scheme: dark" in page
    outline = Outline(page)
    assert (outline.tags["main"], outline.tags["h1"]) == (1, 1)
    assert (outline.headers_without_scope, outline.boxes_without_name) == (0, 0)
    assert "" not in outline.cells
    assert len(outline.pictures) == len(set(outline.pictures)) == page.count("<svg")
    assert not [name for name, times in outline.ids.items() if times > 1]
    assert set(re.findall(r'<a [^>]*href="#([^"]*)"', page)) <= outline.ids.keys()
    assert len(page.encode()) < 1_000_000
    return outline
