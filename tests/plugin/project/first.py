"""Imports of the plugin alone: pytest collects this file first."""

import sys

loaded = {"torchpar.plugin.hooks", "torch", "jax", "numpy", "compare"} & sys.modules.keys()


def test_plugin_imports_no_framework():
    assert loaded == {"torchpar.plugin.hooks"}
