"""A file that a rank cannot import."""

import os

import pytest

if "RANK" in os.environ:
    raise ImportError("only on ranks")


@pytest.mark.ranks(1)
def test_file_breaks_on_ranks(rank): ...
