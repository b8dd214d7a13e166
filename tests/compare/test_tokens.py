"""Text as tokens and back: bytes, nanoGPT's characters; nothing in a meta.pkl is executed."""

import pickle
from pathlib import Path

import pytest

from compare.formats.tokens import META, alphabet_of, alphabet_size
from compare.spec.experiment import Data, Experiment, ExperimentError, Model
from tests.support.rows import short


def spec(source: str, vocab: int) -> Experiment:
    return Experiment(model=Model(vocab_size=vocab), data=Data(source=source))


def test_nanogpts_characters(tmp_path: Path):
    stoi = {"a": 0, "b": 1}
    (tmp_path / META).write_bytes(pickle.dumps({"vocab_size": 2, "stoi": stoi, "itos": {0: "a", 1: "b"}}))
    alphabet = alphabet_of(spec(str(tmp_path), 2))
    assert (alphabet.encode("abba"), alphabet.decode([1, 0, 5])) == ([0, 1, 1, 0], "ba\ufffd")
    with pytest.raises(ExperimentError, match="has no token for 'c'"):
        alphabet.encode("abc")


class Code:
    def __reduce__(self):
        return print, ("executed",)


CONTENTS = {
    "code": (pickle.dumps({"stoi": Code()}), "it has more than dicts, lists, text and numbers"),
    "no_stoi": (pickle.dumps({"vocab_size": 2}), "it has no stoi"),
    "nested": (
        b"\x80\x04}K\x01" + b"\x85" * 3_000_000 + b"K\x02s.",
        "it has more than dicts, lists, text and",
    ),
    "text": (pickle.dumps({"stoi": {"a": "x"}}), "is not a meta.pkl of nanoGPT"),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_nothing_in_meta_pkl_is_executed(tmp_path: Path, capsys, name):
    content, words = CONTENTS[name]
    (tmp_path / META).write_bytes(content)
    with pytest.raises(ExperimentError, match=words):
        alphabet_of(spec("stdlib", 2), meta=tmp_path / META)
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "size"),
    [({"vocab_size": 5, "stoi": {"a": 0, "b": 1}}, 5), ({"vocab_size": 7}, 7), ({"stoi": {"a": 0}}, 1)],
    ids=["both", "vocab_size", "stoi"],
)
def test_vocabulary_size(tmp_path, content, size):
    (tmp_path / META).write_bytes(pickle.dumps(content))
    assert alphabet_size(tmp_path / META) == size


@pytest.mark.parametrize("content", [{}, {"vocab_size": "five"}, {"vocab_size": 0}], ids=short)
def test_missing_vocabulary_size(tmp_path, content):
    (tmp_path / META).write_bytes(pickle.dumps(content))
    with pytest.raises(ExperimentError, match="it has no vocab_size"):
        alphabet_size(tmp_path / META)
