"""Flags that several commands share; the command line and `compare.api` stand above them."""
