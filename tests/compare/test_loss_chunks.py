"""Cross-entropy in parts: no whole logits. `test_matrix` holds its numbers on fsdp_tp to one device."""

import numpy as np
from bounds import assert_bounded

from compare.contract.record import Record, read_record, read_tensors
from compare.contract.request import Rung
from compare.spec.experiment import edited, to_toml

ONE_OF_EACH = ("torch-manual", "jax-compiler")
V, T, B = 4096, 64, 4


def test_logits_in_parts_change_no_number_and_take_less_memory(tiny, shardpair):
    sizes = {"n_embd": 16, "n_head": 2, "block_size": T, "vocab_size": V}
    spec = edited(tiny, {"model": sizes, "train": {"batch_size": B, "max_iters": 2}})
    (shardpair.folder / "wide.toml").write_text(to_toml(spec))

    def trained(name: str, *arguments: str) -> dict[str, Record]:
        run = ("run", "wide.toml", "--engines", *ONE_OF_EACH, "--run_dir", name, "--keep_tensors", *arguments)
        done = shardpair(*run)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "with torch-manual on 13 rungs" in done.stdout
        return {engine: read_record(shardpair.folder / name / engine) for engine in ONE_OF_EACH}

    whole, parts = trained("whole"), trained("parts", "--train.loss_chunks", "8")
    logits = 8 * B * T * V
    for engine in ONE_OF_EACH:
        before, after = whole[engine], parts[engine]
        losses = [[step.loss for step in run.steps] for run in (before, after)]
        np.testing.assert_allclose(*losses, rtol=1e-12)
        expected, found = (read_tensors(run.folder, Rung.GRADIENTS) for run in (before, after))
        for name in expected:
            error = np.abs(found[name] - expected[name]).max() / np.abs(expected[name]).max()
            assert error < 1e-10, name
        assert_bounded(before)
        assert_bounded(after)
        peaks = (run.manifest.peak_memory_bytes[0] for run in (before, after))
        assert next(peaks) - next(peaks) > 1.5 * logits, engine  # logits and gradient; an eighth is left
