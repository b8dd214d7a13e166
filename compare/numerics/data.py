"""The data stream: `Corpus.batch(experiment, step)` is a pure function of the corpus, seed and step.

Every engine and layout draws the same global batch at a step, and a device takes its rows of the batch.
Tokens are validated once, when the corpus is opened, because JAX's gather silently clamps an id beyond the
vocabulary.

Sources (`data.source`):

    stdlib            the bytes of the running Python's standard library, which is text on every machine
    synthetic         a seeded walk
    a folder          nanoGPT's `train.bin` and `val.bin`
    a `.bin` file     tokens, little endian, of 16 bits or 32
    any other file    its bytes

All sources but a folder keep their last tenth for validation, as nanoGPT does.

A `.bin` file of llm.c begins with a header, which has the width and the number of the tokens.
"""

import hashlib
import os
import sysconfig
from pathlib import Path

import numpy as np

from compare.spec.experiment import Experiment, ExperimentError
from compare.system.disk import why_not_readable

STDLIB_BYTES = 4_000_000
SYNTHETIC_TOKENS = 1_000_000
VALIDATION_FRACTION = 0.1
SAMPLE_TOKENS = 1_000_000  # first tokens of a .bin file, to detect the width of its tokens
WIDEST = 2**16  # number of ids in 16 bits
MOST_ZEROS = 0.9  # share of zeros among every second number of 16 bits, beyond which tokens have 32 bits
SPLITS = ("train", "validation")
EVALUATION = 3  # in Philox's counter: 0 draws training batches, 1 the synthetic walk, 2 samples
NUMPY_MAGIC = b"\x93NUMPY"
PACKED = {b"\x1f\x8b\x08": "gzip", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "Zstandard"}
PACKED |= {b"\xfd7zXZ\0": "xz", b"BZh91AY&SY": "bzip2", b"PAR1": "Parquet", b"ARROW1": "Arrow"}
"""First bytes of files that have no text to train on, and their formats."""
SHARDS = {20240520: "<u2", 20240801: "<u4"}
"""Types of tokens by the first number of a shard of llm.c: of GPT-2, of Llama 3."""
NO_TOKENS = range(20240100, 20300000)
"""First numbers of other files of llm.c, which are dates: models, tokenizers, evaluations."""
HEADER = 256  # numbers of 32 bits: the shard's kind, a version, the number of tokens, and zeros
TRAINING = "train.bin"
PREPARE = "prepare.py"  # nanoGPT's
WHAT_TO_GIVE = "give stdlib, synthetic, a text or .bin file, or a folder with train.bin"
_NOT_PROSE = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings"}


class Corpus:
    """Tokens in memory or mapped from a file, validated against the vocabulary.

    Attributes:
        train: uint8, uint16 or uint32 tokens (n,) that training batches are cut from.
        validation: tokens of the same type; may be empty.
        sha256: hex digest of the training tokens' bytes.
    """

    def __init__(self, train: np.ndarray, validation: np.ndarray, sha256: str):
        self.train, self.validation, self.sha256 = train, validation, sha256

    def batch(self, experiment: Experiment, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The global batch of a step: inputs, and targets (the inputs shifted by one token), int32 (A, B, T).

        A = gradient_accumulation_steps, B = batch_size, T = block_size. Data-parallel rank r of R takes the
        rows r B/R to (r+1) B/R of every A.
        """
        return self._draw(experiment, self.train, [0, 0, step, 0])

    def evaluation_batch(
        self, experiment: Experiment, split: str, step: int, index: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """A batch of an evaluation, as `batch`, from windows of a split that training does not draw."""
        tokens = self.train if split == "train" else self.validation
        return self._draw(experiment, tokens, [0, index, step, EVALUATION + SPLITS.index(split)])

    def _draw(
        self, experiment: Experiment, tokens: np.ndarray, counter: list[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        train, length = experiment.train, experiment.model.block_size
        shape = (train.gradient_accumulation_steps, train.batch_size)
        # Raw Philox words: NumPy guarantees their stream, but not the stream of Generator.integers.
        words = np.random.Philox(key=train.seed, counter=counter).random_raw(shape)
        starts_AB = ((words >> np.uint64(11)) * 2.0**-53 * (len(tokens) - length)).astype(np.int64)
        window_ABT = starts_AB[:, :, None] + np.arange(length)
        return tokens[window_ABT].astype(np.int32), tokens[window_ABT + 1].astype(np.int32)


def open_corpus(experiment: Experiment, *, validated_sha256: str = "") -> Corpus:
    """Open the experiment's data. Validate and hash it, unless a launcher did (`validated_sha256`).

    So a launcher reads a large train.bin once, and ranks only map it. Raises ExperimentError: the file or its
    tokens do not fit.
    """
    source = experiment.data.source
    if source == "stdlib":
        train, validation = _split(np.frombuffer(standard_library_text(), dtype=np.uint8))
    elif source == "synthetic":
        train, validation = _split(_synthetic(experiment))
    else:
        train, validation = _read(Path(source), experiment.model.vocab_size)
    _require_windows(train, validation, experiment)
    sha256 = validated_sha256
    if not sha256:
        _validate(train, validation, experiment)
        sha256 = hashlib.sha256(train.data).hexdigest()
    return Corpus(train, validation, sha256)


def standard_library_text() -> bytes:
    """The first `STDLIB_BYTES` bytes of the running Python's own library sources, in order of their paths."""
    text = bytearray()
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = sorted(set(subfolders) - _NOT_PROSE)
        for name in sorted(names):
            if name.endswith(".py"):
                text += Path(folder, name).read_bytes()
        if len(text) >= STDLIB_BYTES:
            break
    return bytes(text[:STDLIB_BYTES])


def _synthetic(experiment: Experiment) -> np.ndarray:
    """A walk that mostly steps by one, which a model can learn. uint16 or uint32 (n,)."""
    vocab = experiment.model.vocab_size
    words = np.random.Philox(key=experiment.train.seed, counter=[0, 0, 0, 1]).random_raw(SYNTHETIC_TOKENS)
    jumps = np.where(words % np.uint64(8) == 0, (words >> np.uint64(32)) % np.uint64(vocab), 1)
    return (np.cumsum(jumps.astype(np.int64)) % vocab).astype(np.uint16 if vocab <= WIDEST else np.uint32)


def _read(path: Path, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    if not why_not_readable(path).startswith("is a folder"):
        return _split(_map(path, vocab))
    train_file, validation_file = path / TRAINING, path / "val.bin"
    if why_not_readable(train_file) == "does not exist":
        prepare = f", which `python {path / PREPARE}` makes;" if (path / PREPARE).is_file() else ";"
        raise ExperimentError(f"data.source: {path} is a folder without train.bin{prepare} {WHAT_TO_GIVE}")
    train = _map(train_file, vocab)
    has_validation = why_not_readable(validation_file) != "does not exist"
    return train, _map(validation_file, vocab) if has_validation else train[:0]


def _map(path: Path, vocab: int) -> np.ndarray:
    """Map a file as an array, so that only accessed parts are read: tokens of a .bin file, else bytes."""
    if wrong := why_not_readable(path):
        raise ExperimentError(f"data.source: {path} {wrong}; {WHAT_TO_GIVE}")
    size, is_bin = path.stat().st_size, path.suffix == ".bin"
    if not size:
        raise ExperimentError(f"data.source: {path} is empty; give a file with text or tokens in it")
    if is_bin and size % 2:
        raise ExperimentError(
            f"data.source: {path} has an odd number of bytes ({size}); a .bin file holds "
            f"uint16 tokens: write it again, or rename it if it is text"
        )
    tokens = np.memmap(path, dtype=np.dtype("<u2") if is_bin else np.uint8, mode="r")
    if tokens[:6].tobytes().startswith(NUMPY_MAGIC):
        raise ExperimentError(
            f"data.source: {path} is a file of numpy.save; write its tokens alone: {_how_to_write(vocab)}"
        )
    first = tokens[:16].tobytes()
    if packed := [] if is_bin else [name for magic, name in PACKED.items() if first.startswith(magic)]:
        raise ExperimentError(
            f"data.source: {path} is in the format {packed[0]}: unpack its text into a file first"
        )
    return _with_width(tokens, path, vocab) if is_bin else tokens


def _with_width(tokens: np.ndarray, path: Path, vocab: int) -> np.ndarray:
    """The tokens of a .bin file, mapped as uint16, in their own width and without a header.

    Two halves of 32-bit tokens make numbers below the vocabulary, and two 16-bit tokens do not.
    """
    if len(tokens) >= 2 * HEADER:
        kind, version, count, *_ = np.array(tokens[: 2 * HEADER]).view("<u4").tolist()
        if dtype := SHARDS.get(kind):
            size = path.stat().st_size - 4 * HEADER
            if size != count * np.dtype(dtype).itemsize:
                counts = f"{size:,} bytes behind its header, and not {count:,} tokens"
                raise ExperimentError(f"data.source: {path} has {counts}: copy it again")
            return np.memmap(path, dtype=dtype, mode="r", offset=4 * HEADER)
        if kind in NO_TOKENS and version < 100:
            raise ExperimentError(f"data.source: {path} is a file of llm.c without tokens: give a shard")
    sample = np.array(tokens[: min(len(tokens), SAMPLE_TOKENS) // 4 * 4])
    low, high = sample[::2], sample[1::2]
    if not low.any():
        return tokens
    if len(sample) and sample.view("<u4").max() < vocab:
        if not sample[2::4].any() and not sample[3::4].any():
            raise ExperimentError(f"data.source: {path} has 64-bit tokens: write {_how_to_write(vocab)}")
        return np.memmap(path, dtype="<u4", mode="r", shape=(len(tokens) // 2,))
    if np.count_nonzero(high == 0) > MOST_ZEROS * len(high):
        raise ExperimentError(
            f"data.source: {path} seems to have 32-bit tokens and something else, such as a header that "
            f"shardpair does not know: write the tokens alone: {_how_to_write(vocab)}"
        )
    if vocab > WIDEST:
        raise ExperimentError(
            f"data.source: {path} has 16-bit tokens, and model.vocab_size = {vocab} needs 32 bits: write "
            f"{_how_to_write(vocab)}"
        )
    return tokens


def _how_to_write(vocab: int) -> str:
    return f"tokens.astype('<u{2 if vocab <= WIDEST else 4}').tofile('train.bin')"


def _split(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    boundary = len(tokens) - int(len(tokens) * VALIDATION_FRACTION)
    return tokens[:boundary], tokens[boundary:]


def _require_windows(train: np.ndarray, validation: np.ndarray, experiment: Experiment) -> None:
    """Reject data that is shorter than one window of training or of evaluation."""
    source, length = experiment.data.source, experiment.model.block_size
    if len(train) <= length:
        raise ExperimentError(
            f"data.source: {source} has {len(train)} training tokens, too few for model.block_size = "
            f"{length}: give more text or a smaller block_size"
        )
    interval = experiment.train.eval_interval
    if interval and len(validation) <= length:
        raise ExperimentError(
            f"train.eval_interval = {interval}: data.source = {source} has {len(validation)} tokens to "
            f"validate on, too few for model.block_size = {length}: give a val.bin beside train.bin, or more "
            f"text"
        )


def _validate(train: np.ndarray, validation: np.ndarray, experiment: Experiment) -> None:
    source, vocab = experiment.data.source, experiment.model.vocab_size
    for tokens in (train, validation):
        origin = tokens.filename if isinstance(tokens, np.memmap) and tokens.filename else source
        largest = int(tokens.max()) if len(tokens) else 0
        is_beyond = largest >= vocab
        if is_beyond and tokens.dtype.itemsize > 1 and tokens[:SAMPLE_TOKENS].byteswap().max() < vocab:
            raise ExperimentError(f"data.source: {origin} is big-endian: write {_how_to_write(vocab)}")
        if is_beyond:
            raise ExperimentError(
                f"data.source: {origin} holds token {largest}, beyond model.vocab_size = {vocab}: "
                f"set --model.vocab_size {largest + 1} or more, or give other data"
            )
