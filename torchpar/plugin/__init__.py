"""Tests of your own sharded code, in both frameworks: a pytest plugin with the marks `ranks` and `devices`.

pytest imports `torchpar.plugin.hooks` in every run. It imports no framework, and not `compare`, which may be
the name of a module of yours. docs/libraries.md is the tutorial.
"""
