"""Helpers of the tests: see tests/README.md."""
