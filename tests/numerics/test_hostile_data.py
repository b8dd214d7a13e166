"""Data of an unexpected width: wider tokens, and a larger vocabulary."""

import msgspec
import numpy as np
import pytest

from compare.numerics.data import open_corpus
from compare.spec.experiment import Data, Experiment, ExperimentError, Model

SMALL = Experiment(model=Model(n_layer=1, n_head=2, n_embd=8, block_size=8))


def test_16_bit_tokens_are_accepted(tmp_path):
    random = np.random.default_rng(0)
    for ids in (random.integers(0, 256, 5000), np.zeros(5000), np.tile([7, 0, 1], 2000)):
        ids.astype("<u2").tofile(tmp_path / "train.bin")
        open_corpus(msgspec.structs.replace(SMALL, data=Data(source=str(tmp_path))))


def test_wide_tokens_are_rejected(tmp_path):
    model = msgspec.structs.replace(SMALL.model, vocab_size=128_256)
    np.random.default_rng(0).integers(0, 128_000, 5000).astype("<u4").tofile(tmp_path / "train.bin")
    with pytest.raises(ExperimentError, match="holds 32- or 64-bit tokens"):
        open_corpus(msgspec.structs.replace(SMALL, model=model, data=Data(source=str(tmp_path))))


def test_synthetic_tokens_have_32_bits():
    model = msgspec.structs.replace(SMALL.model, vocab_size=100_000)
    corpus = open_corpus(msgspec.structs.replace(SMALL, model=model, data=Data(source="synthetic")))
    assert 2**16 < corpus.train.max() < 100_000
