"""Experiments: sections, mesh axes and engines."""
