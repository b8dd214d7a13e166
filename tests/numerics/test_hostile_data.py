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


def corpus_of(folder, content, vocab):
    """The corpus of a train.bin with this content."""
    content.tofile(folder / "train.bin")
    model = msgspec.structs.replace(SMALL.model, vocab_size=vocab)
    return open_corpus(msgspec.structs.replace(SMALL, model=model, data=Data(source=str(folder))))


def ids(vocab, count=5000):
    return np.random.default_rng(0).integers(0, vocab, count)


def shard(kind, tokens, dtype, *, count=None):
    """A file of llm.c: a header of 256 numbers, then the tokens."""
    header = np.zeros(256, "<u4")
    header[:3] = kind, 1, len(tokens) if count is None else count
    return np.concatenate([header.view(np.uint8), tokens.astype(dtype).view(np.uint8)])


@pytest.mark.parametrize("vocab", [256, 50_257, 128_256])
def test_32_bit_tokens_are_read(tmp_path, vocab):
    assert (corpus_of(tmp_path, ids(vocab).astype("<u4"), vocab).train == ids(vocab)).all()


@pytest.mark.parametrize(("kind", "dtype", "vocab"), [(20240520, "<u2", 50_257), (20240801, "<u4", 128_256)])
def test_shard_of_llm_c_is_read(tmp_path, kind, dtype, vocab):
    assert (corpus_of(tmp_path, shard(kind, ids(vocab), dtype), vocab).train == ids(vocab)).all()
    with pytest.raises(ExperimentError, match="bytes behind its header, and not 5,001 tokens: copy it again"):
        corpus_of(tmp_path, shard(kind, ids(vocab), dtype, count=5001), vocab)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (ids(50_257).astype("<u8"), r"has 64-bit tokens: write tokens\.astype\('<u2'\)"),
        (shard(19990101, ids(50_257), "<u4"), "seems to have 32-bit tokens and something else"),
        (shard(20240326, ids(50_257), "<f4"), "is a file of llm.c without tokens: give a shard"),
        (ids(50_257).astype(">u2"), r"is big-endian: write tokens\.astype\('<u2'\)"),
        (ids(50_257).astype(">u4"), r"is big-endian: write tokens\.astype\('<u2'\)"),
    ],
    ids=["64_bits", "unknown_header", "model", "big_endian", "big_endian_32"],
)
def test_wide_tokens_are_rejected(tmp_path, content, why):
    with pytest.raises(ExperimentError, match=why):
        corpus_of(tmp_path, content, 50_257)


def test_16_bits_cannot_hold_a_large_vocabulary(tmp_path):
    """Tokens of 32 bits that were written as 16 wrap around at 65,536, and big-endian ones look like them."""
    for tokens in (ids(128_256).astype("<u2"), ids(128_256).astype(">u4")):
        with pytest.raises(ExperimentError, match=r"needs 32 bits: write tokens\.astype\('<u4'\)"):
            corpus_of(tmp_path, tokens, 128_256)


def test_synthetic_tokens_have_32_bits():
    model = msgspec.structs.replace(SMALL.model, vocab_size=100_000)
    corpus = open_corpus(msgspec.structs.replace(SMALL, model=model, data=Data(source="synthetic")))
    assert 2**16 < corpus.train.max() < 100_000
