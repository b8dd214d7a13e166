"""float16 with dynamic loss scaling: the same steps are skipped in every engine, on several layouts."""

from compare.checkpoint.description import CHECKPOINTS, folder_name
from compare.checkpoint.reader import read_description
from compare.contract.record import read_record
from compare.spec.engines.registry import STUDIED
from compare.spec.experiment import edited, to_toml

FSDP_TP = ("--layout.dp_shard", "2", "--layout.zero", "3", "--layout.tp", "2")
DDP_PP = ("--layout.dp_replicate", "2", "--layout.pp", "2", "--layout.schedule", "gpipe")
HALVED = ("--layout.pp", "2", "--layout.schedule", "zero_bubble", "--layout.microbatches", "2")
STEPS = 8


def test_every_engine_skips_the_same_steps(tiny, shardpair):
    forced = {"dtype": "float16", "loss_scale": 2.0**20}
    spec = edited(tiny, {"precision": forced, "train": {"max_iters": STEPS}, "checkpoint": {"every": 4}})
    (shardpair.folder / "tiny.toml").write_text(to_toml(spec))
    pipelined = [name for name in STUDIED if name.endswith("-manual")]
    others = [name for name in STUDIED if name not in pipelined]
    runs = []
    for run, layout, engines in (("fsdp_tp", FSDP_TP, others), ("ddp_pp", DDP_PP, pipelined)):
        done = shardpair("run", "tiny.toml", *layout, "--run_dir", run, "--engines", *engines)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "steps skipped, last loss scale" in done.stdout
        assert "the first step, which overflowed and was skipped, were not compared" in done.stdout
        runs += [shardpair.folder / run / engine for engine in engines]
    seen = [[(step.skipped, step.loss_scale) for step in read_record(run).steps] for run in runs]
    assert seen[1:] == seen[:-1]
    skipped = [was for was, _ in seen[0]]
    assert any(skipped)
    assert not all(skipped)
    for run in runs:
        saved = read_description(run / CHECKPOINTS / folder_name(STEPS))
        assert (saved.step, saved.updates) == (STEPS, STEPS - sum(skipped))
        assert saved.loss_scale


def test_a_backward_in_two_halves_is_scaled(tiny, shardpair):
    spec = edited(tiny, {"precision": {"dtype": "float16", "loss_scale": 2.0**18}})
    (shardpair.folder / "tiny.toml").write_text(to_toml(spec))
    done = shardpair("run", "tiny.toml", *HALVED, "--engines", "torch-manual", "torch-library")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "steps skipped, last loss scale" in done.stdout
