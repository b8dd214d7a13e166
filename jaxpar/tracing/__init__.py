"""Checks of a loss with a layout's edits, read from its jaxpr."""
