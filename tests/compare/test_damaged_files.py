"""Flipped bits in the files of a run: a reader rejects the file in one line, or shows what is written.

These files have no checksums. Checkpoints have: tests/checkpoint/test_checkpoint_damage.py. So has nanoGPT's
ckpt.pt: tests/torchpar/test_torchpar_nanogpt_checkpoint.py.
"""

import contextlib
import random

import numpy as np
import pytest

from compare.cli import main
from compare.contract.record import EVALUATIONS, LEDGER, MANIFEST, STEPS, WORK
from compare.contract.request import REQUEST
from compare.formats.huggingface import CONFIG, WEIGHTS_FILE, read_gpt2, write_gpt2
from compare.judge.outcome import OUTCOME
from compare.numerics.parameters import parameter_table
from compare.spec.experiment import ExperimentError, Model, edited, parse, to_toml
from compare.system.tensors import RecordError
from tests.support.records import make_run

FLIPS = 25


def flipped(content: bytes, number: int) -> bytes:
    """The content with one flipped bit; its place depends on the number."""
    bit = random.Random(number).randrange(8 * len(content))
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


OF_ENGINE = (REQUEST, MANIFEST, STEPS, EVALUATIONS, LEDGER, WORK)
NAMES = [OUTCOME, *(f"jax-manual/{name}" for name in OF_ENGINE)]


@pytest.mark.parametrize("name", NAMES)
def test_record_with_a_flipped_bit_is_read_or_rejected(folder_of_tiny, tiny, capsys, name):
    make_run(folder_of_tiny / "r", edited(tiny, {"train": {"eval_interval": 2}}))
    path = folder_of_tiny / "r" / name
    content = path.read_bytes()
    for number in range(FLIPS):
        path.write_bytes(flipped(content, number))
        code = main(["report", "r"])
        errors = capsys.readouterr().err
        assert code in (0, 1, 2), number
        assert code < 2 or errors.count("\n") == 1, errors


def test_experiment_with_a_flipped_bit_is_read_or_rejected(tiny):
    content = to_toml(tiny).encode()
    for number in range(8 * FLIPS):
        with contextlib.suppress(ExperimentError):
            parse(flipped(content, number))


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS_FILE])
def test_huggingface_folder_with_a_flipped_bit_is_read_or_rejected(tmp_path, name):
    model = Model(n_layer=1, n_head=1, n_embd=2, block_size=2, vocab_size=3, bias=True)
    weights = {row.name: np.ones(row.shape, np.float32) for row in parameter_table(model)}
    write_gpt2(tmp_path, model, weights)
    content = (tmp_path / name).read_bytes()
    for number in range(4 * FLIPS):
        (tmp_path / name).write_bytes(flipped(content, number))
        with contextlib.suppress(ExperimentError, RecordError):
            read_gpt2(tmp_path)
