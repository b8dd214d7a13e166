"""Records that are not what was requested, mostly both of a pair alike: each fails at its rung."""

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from compare.checkpoint.description import CHECKPOINTS
from compare.contract import record as files
from compare.contract.communication import GRADIENTS
from compare.contract.record import read_record, read_tensors
from compare.contract.request import ResumePoint, Rung
from compare.judge.alone import REQUEST, judged
from compare.numerics.optimizer import reference_step
from compare.numerics.parameters import parameter_table
from compare.spec.axes import TP
from compare.spec.experiment import edited
from compare.system.json_files import read_json
from compare.system.tensors import RecordError
from tests.support.checkpoints import STEP, UPDATES, random_state, write_random
from tests.support.records import climbed, make_record, make_steps, tensors_of
from tests.support.small_checkpoint import EXPERIMENT, save

REFERENCE, CANDIDATE = (("reference",), ("candidate",))
BOTH = (*REFERENCE, *CANDIDATE)
READING = "reading"
"""Stands for a rung if the record cannot be read."""
RECORDED = [rung for rung in Rung if rung != Rung.ROUTING]
SINGLE = "single"
"""Folder of a run on one device."""
Damage = Callable[[Path], object]


def ignore_layout(folder: Path) -> None:
    """Replace the record by a run on one device; the request stays."""
    asked = (folder / files.REQUEST).read_bytes()
    shutil.rmtree(folder)
    shutil.copytree(folder.parent / SINGLE, folder)
    (folder / files.REQUEST).write_bytes(asked)


def garble(name: str, change: Callable[[bytes], bytes]) -> Damage:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def fields(name: str, change: Callable[[dict], object]) -> Damage:

    def damage(folder: Path) -> None:
        content = read_json(folder / name, dict)
        change(content)
        files.write_json(folder / name, content)

    return damage


def manifest(section: str = "", **changes: object) -> Damage:
    """Change fields of the manifest, or of a section of its experiment."""
    return fields(
        files.MANIFEST, lambda found: (found["experiment"][section] if section else found).update(changes)
    )


def work(**changes: object) -> Damage:
    return fields(files.WORK, lambda found: found.update(changes))


def sent(**changes: object) -> Damage:
    """Change the ledger's rows of gradients."""
    return fields(
        files.LEDGER,
        lambda found: [row.update(changes) for row in found["rows"] if row["purpose"] == GRADIENTS],
    )


def lines(name: str, change: Callable[[list[dict]], list[dict]]) -> Damage:

    def changed(content: bytes) -> bytes:
        return b"".join(
            msgspec.json.encode(line) + b"\n"
            for line in change([msgspec.json.decode(line) for line in content.splitlines()])
        )

    return garble(name, changed)


def scaled(field: str, *, first: int, by: float = 1.5, name: str = files.STEPS) -> Damage:
    """Multiply a field from step `first` on."""
    return lines(
        name,
        lambda steps: [step | {field: by * step[field]} if step["step"] >= first else step for step in steps],
    )


def tensors(rung: Rung, change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> Damage:
    return lambda folder: files.write_tensors(folder, rung, change(dict(read_tensors(folder, rung))))


def all_of(rung: Rung, change: Callable[[np.ndarray], np.ndarray]) -> Damage:
    return tensors(rung, lambda named: {name: change(tensor) for name, tensor in named.items()})


def without(*names: str) -> Damage:
    return lambda folder: [(folder / name).unlink() for name in names]


def train_nothing(folder: Path) -> None:
    files.write_tensors(folder, Rung.FIRST_WEIGHTS, dict(read_tensors(folder, Rung.INITIAL_WEIGHTS)))


def begin_elsewhere(folder: Path) -> None:
    all_of(Rung.INITIAL_WEIGHTS, lambda tensor: tensor + 1e-3)(folder)
    manifest(initial_weights_sha256="0" * 64)(folder)


def rounded(tensor: np.ndarray) -> np.ndarray:
    """Round weights to 8 bits, as bfloat16 has."""
    mantissa, exponent = np.frexp(tensor)
    return np.ldexp(np.round(mantissa * 256) / 256, exponent).astype(tensor.dtype)


def turned(named: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Negate the query third of a bias."""
    name = next(name for name in named if name.endswith("qkv.bias"))
    return named | {name: np.concatenate([-named[name][:1], named[name][1:]])}


FAULTS = {
    "ignored_layout": (READING, CANDIDATE, ignore_layout),
    "silent_axis": (REQUEST, BOTH, garble(files.LEDGER, lambda text: b"{}\n")),
    "another_engine": (READING, BOTH, manifest(engine="jax-compiler")),
    "another_platform": (READING, BOTH, manifest(platform="gpu")),
    "negative_devices": (READING, BOTH, manifest(devices=-1)),
    "memory_of_one_device": (READING, BOTH, manifest(peak_memory_bytes=[1])),
    "fewer_steps": (READING, BOTH, lines(files.STEPS, lambda steps: steps[:2])),
    "repeated_steps": (READING, BOTH, lines(files.STEPS, lambda steps: [*steps[:2], *steps[:-2]])),
    "another_corpus": ("batch", CANDIDATE, manifest(corpus_sha256="0" * 64)),
    "diverged": (REQUEST, BOTH, scaled("loss", first=1, by=float("nan"))),
    "diverged_evaluation": (
        REQUEST,
        BOTH,
        scaled("validation", first=0, by=float("nan"), name=files.EVALUATIONS),
    ),
    "no_tensors": (REQUEST, BOTH, without(*(f"{rung}.safetensors" for rung in RECORDED))),
    **{f"no_{rung}": (REQUEST, BOTH, without(f"{rung}.safetensors")) for rung in RECORDED},
    "lacking_tensor": (REQUEST, BOTH, tensors(Rung.GRADIENTS, lambda named: dict([*named.items()][1:]))),
    "misnamed_tensor": (
        REQUEST,
        BOTH,
        tensors(Rung.GRADIENTS, lambda named: {f"{name}_": tensor for name, tensor in named.items()}),
    ),
    "flat_tensors": (REQUEST, BOTH, all_of(Rung.FIRST_WEIGHTS, np.ravel)),
    "rounded_tensors": (REQUEST, BOTH, all_of(Rung.FIRST_V, lambda tensor: tensor.astype(np.float16))),
    "zero_gradients": (REQUEST, BOTH, all_of(Rung.GRADIENTS, np.zeros_like)),
    "trained_nothing": ("updates", BOTH, train_nothing),
    "other_weights": ("initial_weights", BOTH, begin_elsewhere),
    "wrong_norm": ("grad_norm", BOTH, scaled("grad_norm", first=0)),
    "wrong_second_norm": ("grad_norm", BOTH, scaled("grad_norm", first=1)),
    "wrong_later_norm": ("norm_curve", CANDIDATE, scaled("grad_norm", first=2)),
    "wrong_update": ("updates", BOTH, all_of(Rung.FIRST_WEIGHTS, rounded)),
    "wrong_second_update": ("updates", BOTH, all_of(Rung.SECOND_WEIGHTS, rounded)),
    "wrong_second_moment": ("updates", BOTH, all_of(Rung.SECOND_V, rounded)),
    "no_last_update": ("final_weights", CANDIDATE, all_of(Rung.FINAL_WEIGHTS, np.zeros_like)),
    "reference_alone": (REQUEST, REFERENCE, all_of(Rung.GRADIENTS, np.zeros_like)),
    "another_batch": (REQUEST, BOTH, tensors(Rung.BATCH, lambda named: named | {"targets": named["inputs"]})),
    "other_axis": (REQUEST, BOTH, sent(axis=TP)),
    "turned_query_bias": ("later_weights", CANDIDATE, tensors(Rung.LATER_WEIGHTS, turned)),
    "better_validation": (
        "evaluations",
        CANDIDATE,
        scaled("validation", first=0, by=0.9, name=files.EVALUATIONS),
    ),
    "lacking_evaluation": (REQUEST, BOTH, lines(files.EVALUATIONS, lambda lines: lines[:-1])),
    "no_work": ("strategy", BOTH, without(files.WORK)),
    "other_products": ("strategy", BOTH, work(products={"bfloat16": 9})),
    "reference_products": ("strategy", REFERENCE, work(products={"bfloat16": 9})),
    "other_residual": ("strategy", BOTH, work(kept={"norm": ["float64"], "loss": ["float64"]})),
    "parted_replicas": ("strategy", BOTH, manifest(replicas_apart="another norm.scale on device 1")),
    "other_remat": ("strategy", BOTH, work(again={"activations": 4, "products": 20})),
    "whole_logits": ("strategy", BOTH, work(logits_positions=[1])),
    "other_sync": ("strategy", BOTH, sent(calls=99)),
    "other_messages": ("strategy", BOTH, sent(dtype="bfloat16")),
    "incomplete_ledger": (
        "strategy",
        BOTH,
        fields(files.LEDGER, lambda found: found.update(problems=["a loop without a bound"])),
    ),
    "held_more": (
        "strategy",
        BOTH,
        fields(files.MANIFEST, lambda found: found["resident_bytes"].update(optimizer=[10**6] * 2)),
    ),
    "failed_as_well": (READING, BOTH, lambda folder: (folder / files.ERROR).write_bytes(b"{}")),
    "no_steps": (READING, BOTH, garble(files.STEPS, lambda text: b"")),
    "garbled_tensors": (
        READING,
        BOTH,
        garble(f"{Rung.GRADIENTS}.safetensors", lambda content: content[: len(content) // 2]),
    ),
}
"""The first rung that each damage fails, the damaged records, and the damage."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny):
    """A pair on two devices, and the candidate's engine on one."""
    folder = tmp_path_factory.mktemp("trained")
    train = {"max_iters": 5, "eval_interval": 2, "eval_iters": 1}
    changes = {"train": train, "optimizer": {"warmup_iters": 2}, "data": {"source": "synthetic"}}
    five = edited(tiny, changes)
    sharded = edited(five, {"layout": {"dp_replicate": 2}})
    make_record(folder / "reference", sharded, engine="torch-manual")
    make_record(folder / "candidate", sharded, engine="jax-manual")
    make_record(folder / SINGLE, five, engine="jax-manual")
    return folder


def first_failure(trained: Path, scratch: Path, whose: tuple[str, ...], damage: Damage) -> tuple[str, str]:
    """The first failed rung of damaged copies, "" if none failed; and the sentence."""
    for record in (*BOTH, SINGLE):
        shutil.copytree(trained / record, scratch / record)
    for record in whose:
        damage(scratch / record)
    try:
        verdict = climbed(*(read_record(scratch / record) for record in BOTH))
    except RecordError as error:
        return READING, str(error)
    return verdict.failure.rung if verdict.failure else "", verdict.sentence()


def test_undamaged_record_passes(trained, tmp_path):
    assert first_failure(trained, tmp_path, (), lambda folder: None) == ("", "PASS")


@pytest.mark.parametrize("name", FAULTS)
def test_damaged_record(trained, tmp_path, name):
    expected, whose, damage = FAULTS[name]
    rung, sentence = first_failure(trained, tmp_path, whose, damage)
    assert rung == expected, sentence
    assert "inf" not in sentence


@pytest.mark.parametrize(
    ("change", "step", "words"),
    [
        (0.0, 3, ""),
        (1.0, 3, "its checkpoint after step 3 has another"),
        (0.0, 2, "it saved no checkpoint after its last step, 3"),
    ],
)
def test_last_checkpoint_is_the_final_state(tmp_path, change, step, words):
    spec = edited(EXPERIMENT, {"train": {"max_iters": 3}, "checkpoint": {"every": 1}})
    saved = {name: x for (group, name), x in random_state(EXPERIMENT).items() if group == "weights"}
    final = {Rung.FINAL_WEIGHTS: {name: tensor + change for name, tensor in saved.items()}}
    record = make_record(tmp_path / "run", spec, tensors=tensors_of(spec) | final)
    save(record.folder / CHECKPOINTS, step)
    found = [one for one in judged(record).alone.request if "checkpoint" in one]
    assert bool(found) == bool(words)
    assert words in "".join(found)


@pytest.mark.parametrize("forgotten", [False, True])
def test_first_update_of_a_resumed_run(tmp_path, tiny, forgotten):
    """The update begins with the checkpoint's moments; a run that begins with zeros fails."""
    spec = edited(tiny, {"train": {"max_iters": STEP + 1}, "optimizer": {"warmup_iters": 2}})
    checkpoint = write_random(tmp_path / "first", spec)
    state: dict[str, dict[str, np.ndarray]] = {}
    for (group, name), tensor in random_state(spec).items():
        state.setdefault(group, {})[name] = tensor
    weights, moments = state.pop("weights"), {} if forgotten else state
    made = tensors_of(spec)
    given = spec.optimizer, parameter_table(spec.model), weights, made[Rung.GRADIENTS], moments, STEP
    after, later = reference_step(*given, updates=UPDATES)
    tensors = {rung: made[rung] for rung in (Rung.BATCH, Rung.GRADIENTS)}
    tensors |= {Rung.INITIAL_WEIGHTS: weights, Rung.FIRST_WEIGHTS: after}
    tensors |= {Rung.FIRST_M: later["m"], Rung.FIRST_V: later["v"]}
    point = ResumePoint(checkpoint=str(checkpoint), step=STEP)
    steps = make_steps(spec)[STEP:]
    error, place = judged(
        make_record(tmp_path / "run", spec, tensors=tensors, steps=steps, resume=point)
    ).alone.own["updates"]
    assert error > 1e-3 if forgotten else error < 1e-12, place
