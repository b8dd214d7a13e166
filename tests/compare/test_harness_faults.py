"""Records that are not what was asked for, mostly both of a pair alike: each must turn red at its rung."""

import shutil

import damages
import pytest
from damages import SINGLE
from records import make_record

from compare.contract import record as files
from compare.contract.record import read_record
from compare.contract.request import Rung
from compare.host.tensors import RecordError
from compare.judge import ladder
from compare.judge.ladder import EVALUATIONS, FINAL, REQUEST, STRATEGY, climb
from compare.spec.axes import TP
from compare.spec.experiment import edited

REFERENCE, CANDIDATE = (("reference",), ("candidate",))
BOTH = (*REFERENCE, *CANDIDATE)
LATER, READING = "later_weights", "reading"
"""Where a record is caught that cannot be read at all."""
FAULTS = (
    ("ignored_layout", REQUEST, CANDIDATE, damages.ignore_layout),
    ("silent_axis", REQUEST, BOTH, damages.garble(files.LEDGER, lambda text: b"{}\n")),
    ("another_engine", REQUEST, BOTH, damages.manifest(engine="jax-compiler")),
    ("another_experiment", REQUEST, BOTH, damages.manifest(train__seed=1)),
    ("another_platform", REQUEST, BOTH, damages.manifest(platform="gpu")),
    ("another_corpus", REQUEST, BOTH, damages.manifest(corpus_sha256="0" * 64)),
    ("another_dtype", REQUEST, CANDIDATE, damages.manifest(precision__dtype="float32")),
    ("fewer_steps", REQUEST, BOTH, damages.steps(lambda steps: steps[:2])),
    ("repeated_steps", REQUEST, BOTH, damages.steps(lambda steps: [*steps[:2], *steps[:-2]])),
    ("wrong_lr", REQUEST, BOTH, damages.scaled("lr", first=1)),
    ("diverged", REQUEST, BOTH, damages.scaled("loss", first=1, by=float("nan"))),
    ("no_tensors", REQUEST, BOTH, damages.without(*Rung)),
    *((f"no_{rung}", REQUEST, BOTH, damages.without(rung)) for rung in Rung),
    ("lacking_tensor", REQUEST, BOTH, damages.tensors(Rung.GRADIENTS, damages.lacking)),
    ("misnamed_tensor", REQUEST, BOTH, damages.tensors(Rung.GRADIENTS, damages.misnamed)),
    ("flat_tensors", REQUEST, BOTH, damages.tensors(Rung.FIRST_WEIGHTS, damages.flattened)),
    ("rounded_tensors", REQUEST, BOTH, damages.tensors(Rung.FIRST_V, damages.in_float16)),
    ("zero_gradients", REQUEST, BOTH, damages.tensors(Rung.GRADIENTS, damages.zero)),
    ("trained_nothing", REQUEST, BOTH, damages.train_nothing),
    ("other_weights", "initial_weights", BOTH, damages.begin_elsewhere),
    ("wrong_norm", "grad_norm", BOTH, damages.scaled("grad_norm", first=0)),
    ("wrong_later_norm", "norm_curve", CANDIDATE, damages.scaled("grad_norm", first=1)),
    ("wrong_update", "first_update", BOTH, damages.round_first_weights),
    ("no_last_update", FINAL, CANDIDATE, damages.tensors(Rung.FINAL_WEIGHTS, damages.zero)),
    ("reference_alone", REQUEST, REFERENCE, damages.scaled("lr", first=1)),
    (
        "another_batch",
        REQUEST,
        BOTH,
        damages.tensors(Rung.BATCH, lambda named: named | {"targets": named["inputs"]}),
    ),
    ("negative_times", REQUEST, BOTH, damages.each(step_time_ms=-1.0)),
    ("other_throughput", REQUEST, BOTH, damages.each(tokens_per_s=1.0)),
    ("all_watched", REQUEST, BOTH, damages.each(instrumented=True)),
    ("no_memory", REQUEST, BOTH, damages.without_memory),
    ("other_axis", REQUEST, BOTH, damages.ledger(axis=TP)),
    ("turned_query_bias", LATER, CANDIDATE, damages.turn_query_bias),
    ("better_validation", EVALUATIONS, CANDIDATE, damages.evaluations(damages.better_validation)),
    ("lacking_evaluation", REQUEST, BOTH, damages.evaluations(damages.lacking_last)),
    ("no_work", STRATEGY, BOTH, damages.without_work),
    ("other_products", STRATEGY, BOTH, damages.work(products={"bfloat16": 9})),
    ("reference_products", STRATEGY, REFERENCE, damages.work(products={"bfloat16": 9})),
    ("other_remat", STRATEGY, BOTH, damages.work(again=["activations", "products"])),
    ("whole_logits", STRATEGY, BOTH, damages.work(logits_positions=[1])),
    ("other_sync", STRATEGY, BOTH, damages.ledger(calls=99)),
    ("other_messages", STRATEGY, BOTH, damages.ledger(dtype="bfloat16")),
    ("incomplete_ledger", STRATEGY, BOTH, damages.with_a_problem),
    ("held_more", STRATEGY, BOTH, damages.held_twice),
    ("failed_as_well", READING, BOTH, damages.failed_as_well),
    ("no_steps", READING, BOTH, damages.garble(files.STEPS, lambda text: b"")),
    (
        "garbled_tensors",
        READING,
        BOTH,
        damages.garble(f"{Rung.GRADIENTS}.safetensors", lambda content: content[: len(content) // 2]),
    ),
)
"""Name, the first rung that it must turn red, whose record is damaged, and how."""


@pytest.fixture
def trained(tmp_path, tiny):
    """A pair on two devices, and the candidate's engine on one."""
    train = {"max_iters": 5, "eval_interval": 2, "eval_iters": 1}
    changes = {"train": train, "optimizer": {"warmup_iters": 2}, "data": {"source": "synthetic"}}
    five = edited(tiny, changes)
    sharded = edited(five, {"layout": {"dp_replicate": 2}})
    make_record(tmp_path / "reference", sharded, engine="torch-manual")
    make_record(tmp_path / "candidate", sharded, engine="jax-manual")
    make_record(tmp_path / SINGLE, five, engine="jax-manual")
    return tmp_path


def caught_at(trained, name, whose, damage):
    """The first rung that is red if copies of the records are damaged, '' if none is; and the sentence."""
    scratch = trained / "planted" / name
    for record in (*BOTH, SINGLE):
        shutil.copytree(trained / record, scratch / record)
    for record in whose:
        damage(scratch / record)
    try:
        verdict = climb(*(read_record(scratch / record) for record in BOTH))
    except RecordError as error:
        return READING, str(error)
    return verdict.failure.rung if verdict.failure else "", verdict.sentence()


def test_every_damaged_record_is_red_where_it_should_be(trained):
    assert caught_at(trained, "none", (), None) == ("", "PASS")
    for name, expected, whose, damage in FAULTS:
        rung, sentence = caught_at(trained, name, whose, damage)
        assert rung == expected, (name, sentence)
        assert "inf" not in sentence, name


def test_without_the_request_most_of_them_would_pass(trained, monkeypatch):
    """The faults are real: it is the check against the request that sees them, and nothing else."""
    monkeypatch.setattr(ladder, "objections", lambda record: [])
    for name, expected, whose, damage in FAULTS:
        seen_between_the_two = name == "another_dtype"
        rung, _ = caught_at(trained, name, whose, damage)
        assert (rung == expected) == (expected != REQUEST or seen_between_the_two), name
