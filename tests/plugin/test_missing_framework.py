"""One line names the extra if a framework is not installed."""

import importlib
import importlib.util

import pytest

from torchpar.plugin import pool


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("torch", "jax") else find(name)
    )


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("ranks", "ranks needs PyTorch: pip install 'shardpair[torch]'"),
        ("devices", "needs JAX: pip install 'shardpair[jax]'"),
    ],
)
def test_mark_names_the_extra(nothing_installed, kind, words):
    with pytest.raises(ImportError) as error:
        pool.require(kind)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("torchpar.run_ranks", "torchpar.run_ranks needs PyTorch: pip install 'shardpair[torch]'"),
        ("jaxpar.assert_same", "jaxpar.assert_same needs JAX: pip install 'shardpair[jax]'"),
    ],
)
def test_function_names_the_extra(monkeypatch, name, words):
    side, _, function = name.partition(".")
    module = importlib.import_module(side)
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ImportError) as error:
        getattr(module, function)
    assert str(error.value) == words
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing
