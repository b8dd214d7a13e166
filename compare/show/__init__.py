"""Findings of a study in a terminal, on a page, as Markdown and as JSON."""
