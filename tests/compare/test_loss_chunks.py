"""Cross-entropy in parts: every engine has the same loss, gradients and evaluations, and no whole logits."""

import numpy as np
from bounds import assert_bounded
from untrained import untrained_losses

from compare.contract.record import Record, read_record, read_tensors
from compare.contract.request import Rung
from compare.spec.engines.registry import STUDIED
from compare.spec.experiment import edited, to_toml

ENGINES = ("torch-manual", *(name for name in STUDIED if name != "torch-manual"))
ONE_OF_EACH = ("torch-manual", "jax-compiler")
V, T, B = 4096, 64, 4
FSDP_TP = ("--layout.dp_shard", "2", "--layout.zero", "3", "--layout.tp", "2")


def test_logits_in_parts_change_no_number_and_take_less_memory(tiny, shardpair):
    sizes = {"n_embd": 16, "n_head": 2, "block_size": T, "vocab_size": V}
    spec = edited(tiny, {"model": sizes, "train": {"batch_size": B, "max_iters": 2}})
    (shardpair.folder / "wide.toml").write_text(to_toml(spec))

    def trained(name: str, engines: tuple[str, ...], *arguments: str, rungs: int = 13) -> dict[str, Record]:
        done = shardpair(
            "run", "wide.toml", "--engines", *engines, "--run_dir", name, "--keep_tensors", *arguments
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"with torch-manual on {rungs} rungs" in done.stdout
        return {engine: read_record(shardpair.folder / name / engine) for engine in engines}

    whole = trained("whole", ONE_OF_EACH)
    parts = trained("parts", ONE_OF_EACH, "--train.loss_chunks", "8")
    evaluated = ("--train.eval_interval", "2", "--train.eval_iters", "2")
    spread = trained("spread", ENGINES, "--train.loss_chunks", "4", *FSDP_TP, *evaluated, rungs=14)
    for record in (*parts.values(), *spread.values()):
        right = whole["torch-manual"]
        losses = [[step.loss for step in one.steps] for one in (record, right)]
        np.testing.assert_allclose(*losses, rtol=1e-12)
        found, expected = (read_tensors(one.folder, Rung.GRADIENTS) for one in (record, right))
        for name in expected:
            error = np.abs(found[name] - expected[name]).max() / np.abs(expected[name]).max()
            assert error < 1e-10, name
    spec = edited(spec, {"train": {"eval_iters": 2}})
    for record in spread.values():  # of layers and parameters that are split, as of those that are whole
        first = record.evaluations[0]
        np.testing.assert_allclose((first.train, first.validation), untrained_losses(spec), rtol=1e-12)
    for record in (*whole.values(), *parts.values()):
        assert_bounded(record)
    logits = 8 * B * T * V
    for engine in ONE_OF_EACH:
        before, after = (runs[engine].manifest.peak_memory_bytes[0] for runs in (whole, parts))
        assert before - after > 1.5 * logits, engine  # they and their gradient, of which an eighth is left
