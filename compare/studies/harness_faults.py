"""Faults that only the harness can notice: records that are not what was asked for; each must turn red.

Two engines are trained once. For every fault their records are copied and damaged, mostly both alike: then
they agree with each other, and only a harness that holds them against the request can tell.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from compare.contract import record as files
from compare.contract.communication import GRADIENTS
from compare.contract.record import Step, read_record, read_steps, read_tensors
from compare.contract.request import Rung
from compare.host.json_files import read_json
from compare.host.tensors import RecordError
from compare.judge.ladder import EVALUATIONS, FINAL, REQUEST, STRATEGY, climb
from compare.numerics.evaluation import Evaluation
from compare.spec.axes import TP

PAIR, SINGLE = ("reference", "candidate"), "single"
REFERENCE, CANDIDATE = (("reference",), ("candidate",))
LATER, READING = "later_weights", "reading"
"""Where a record is caught that cannot be read at all."""

Damage = Callable[[Path], None]


class HarnessFault(Struct, frozen=True, kw_only=True):
    """One way in which a record is not what was asked for."""

    name: str
    rung: str
    """The first rung that it must turn red."""
    description: str
    damage: Damage
    """What is done to an engine's folder."""
    whose: tuple[str, ...] = PAIR
    """Records that are damaged: both alike, or one."""

    @property
    def both(self) -> bool:
        """True if the two still agree with each other."""
        return self.whose == PAIR


class Caught(Struct, frozen=True, kw_only=True):
    """Outcome of one fault."""

    fault: str
    description: str
    both: bool
    expected: str
    rung: str
    """The first rung that failed; empty if none did."""
    sentence: str

    @property
    def is_right(self) -> bool:
        """True if it was caught where it should be."""
        return self.rung == self.expected


def plant_all(trained: Path, scratch: Path) -> list[Caught]:
    """Damage copies of two records in every known way, and hold them against each other.

    Args:
        trained: a folder with the records `reference`, `candidate` and `single`, the last one of the
            candidate's engine on one device.
        scratch: an empty folder for the copies.

    Returns:
        One entry for each fault; the first is a control without any.
    """
    control = HarnessFault(name="none", rung="", description="nothing: must pass", damage=lambda folder: None)
    return [_plant(fault, trained, scratch / fault.name) for fault in (control, *HARNESS_FAULTS.values())]


def _plant(fault: HarnessFault, trained: Path, scratch: Path) -> Caught:
    for name in (*PAIR, SINGLE):
        shutil.copytree(trained / name, scratch / name)
    for name in PAIR:
        if name in fault.whose:
            fault.damage(scratch / name)
    try:
        verdict = climb(*(read_record(scratch / name) for name in PAIR))
        rung, sentence = verdict.failure.rung if verdict.failure else "", verdict.sentence()
    except RecordError as error:
        rung, sentence = READING, str(error)
    return Caught(
        fault=fault.name,
        description=fault.description,
        both=fault.both,
        expected=fault.rung,
        rung=rung,
        sentence=sentence,
    )


def _ignore_layout(folder: Path) -> None:
    """The record of a real run on one device, which answers the request for several."""
    asked = (folder / files.REQUEST).read_bytes()
    shutil.rmtree(folder)
    shutil.copytree(folder.parent / SINGLE, folder)
    (folder / files.REQUEST).write_bytes(asked)


def _manifest(**fields: object) -> Damage:
    """Say something else in the manifest; fields of the experiment as section__key."""

    def damage(folder: Path) -> None:
        manifest = read_json(folder / files.MANIFEST, dict)
        for key, value in fields.items():
            section, _, field = key.partition("__")
            (manifest["experiment"][section] if field else manifest)[field or key] = value
        files.write_json(folder / files.MANIFEST, manifest)

    return damage


def _steps(change: Callable[[list[Step]], list[Step]]) -> Damage:
    def damage(folder: Path) -> None:
        steps = change(read_steps(folder / files.STEPS))
        (folder / files.STEPS).write_bytes(b"".join(msgspec.json.encode(step) + b"\n" for step in steps))

    return damage


def _scaled(field: str, *, first: int, by: float = 1.5) -> Damage:
    """A wrong figure from step `first` on."""
    return _steps(
        lambda steps: [
            msgspec.structs.replace(step, **{field: by * getattr(step, field)})
            if step.step >= first
            else step
            for step in steps
        ]
    )


def _tensors(rung: Rung, change: Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]]) -> Damage:
    return lambda folder: files.write_tensors(folder, rung, change(dict(read_tensors(folder, rung))))


def _without(*rungs: Rung) -> Damage:
    def damage(folder: Path) -> None:
        for rung in rungs:
            (folder / f"{rung}.safetensors").unlink()

    return damage


def _first_of(tensors: Mapping[str, np.ndarray]) -> str:
    return min(tensors)


def _lacking(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: tensor for name, tensor in tensors.items() if name != _first_of(tensors)}


def _misnamed(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"{name}_" if name == _first_of(tensors) else name: tensor for name, tensor in tensors.items()}


def _flattened(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: tensor.reshape(-1) for name, tensor in tensors.items()}


def _in_float16(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: tensor.astype(np.float16) for name, tensor in tensors.items()}


def _zero(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.zeros_like(tensor) for name, tensor in tensors.items()}


def _train_nothing(folder: Path) -> None:
    files.write_tensors(folder, Rung.FIRST_WEIGHTS, dict(read_tensors(folder, Rung.INITIAL_WEIGHTS)))


def _begin_elsewhere(folder: Path) -> None:
    moved = {name: tensor + 1e-3 for name, tensor in read_tensors(folder, Rung.INITIAL_WEIGHTS).items()}
    files.write_tensors(folder, Rung.INITIAL_WEIGHTS, moved)
    _manifest(initial_weights_sha256="0" * 64)(folder)


def _garble(name: str, change: Callable[[bytes], bytes]) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return damage


def _round_first_weights(folder: Path) -> None:
    """Keep of each weight the 8 bits of a bfloat16, and of a float64 as many."""

    def rounded(tensor: np.ndarray) -> np.ndarray:
        mantissa, exponent = np.frexp(tensor)
        return np.ldexp(np.round(mantissa * 256) / 256, exponent).astype(tensor.dtype)

    _tensors(Rung.FIRST_WEIGHTS, lambda named: {name: rounded(one) for name, one in named.items()})(folder)


def _turn_query_bias(folder: Path) -> None:
    """The query third of the bias, whose key third no rung after the gradients can hold."""

    def turned(named: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        name = next(name for name in named if name.endswith("qkv.bias"))
        query = np.concatenate([-named[name][:1], named[name][1:]])
        return named | {name: query}

    _tensors(Rung.LATER_WEIGHTS, turned)(folder)


def _evaluations(change: Callable[[list[Evaluation]], list[Evaluation]]) -> Damage:
    def damage(folder: Path) -> None:
        lines = (folder / files.EVALUATIONS).read_bytes().splitlines()
        changed = change([msgspec.json.decode(line, type=Evaluation) for line in lines])
        content = b"".join(msgspec.json.encode(one) + b"\n" for one in changed)
        (folder / files.EVALUATIONS).write_bytes(content)

    return damage


def _each(**fields: object) -> Damage:
    """The same figure in every step."""
    return _steps(lambda steps: [msgspec.structs.replace(step, **fields) for step in steps])


def _lacking_last(done: list[Evaluation]) -> list[Evaluation]:
    return done[:-1]


def _better_validation(done: list[Evaluation]) -> list[Evaluation]:
    return [msgspec.structs.replace(one, validation=one.validation * 0.9) for one in done]


def _without_work(folder: Path) -> None:
    (folder / files.WORK).unlink()


def _work(**fields: object) -> Damage:
    """Another figure in what was seen of the step."""

    def damage(folder: Path) -> None:
        files.write_json(folder / files.WORK, read_json(folder / files.WORK, dict) | fields)

    return damage


def _ledger(**fields: object) -> Damage:
    """Another figure in the rows of gradients."""

    def damage(folder: Path) -> None:
        ledger = read_json(folder / files.LEDGER, dict)
        for row in ledger["rows"]:
            row |= fields if row["purpose"] == GRADIENTS else {}
        files.write_json(folder / files.LEDGER, ledger)

    return damage


def _with_a_problem(folder: Path) -> None:
    ledger = read_json(folder / files.LEDGER, dict)
    files.write_json(folder / files.LEDGER, ledger | {"problems": ["something was sent that nobody saw"]})


def _without_memory(folder: Path) -> None:
    held = read_json(folder / files.MANIFEST, dict)["peak_memory_bytes"]
    _manifest(peak_memory_bytes=[0] * len(held))(folder)


def _failed_as_well(folder: Path) -> None:
    (folder / files.ERROR).write_bytes(b"{}")


def _held_twice(folder: Path) -> None:
    held = read_json(folder / files.MANIFEST, dict)["resident_bytes"]
    _manifest(resident_bytes=held | {"optimizer": [2 * size for size in held["optimizer"]]})(folder)


def _fault(name: str, rung: str, description: str, damage: Damage, **more: Any) -> HarnessFault:
    return HarnessFault(name=name, rung=rung, description=description, damage=damage, **more)


HARNESS_FAULTS = {
    fault.name: fault
    for fault in (
        _fault("ignored_layout", REQUEST, "it trained on one device", _ignore_layout, whose=CANDIDATE),
        _fault("silent_axis", REQUEST, "nothing was ever sent", _garble(files.LEDGER, lambda text: b"{}\n")),
        _fault("another_engine", REQUEST, "another engine's record", _manifest(engine="jax-compiler")),
        _fault("another_experiment", REQUEST, "another experiment's records", _manifest(train__seed=1)),
        _fault("another_platform", REQUEST, "they ran on GPUs", _manifest(platform="gpu")),
        _fault("another_corpus", REQUEST, "they read other data", _manifest(corpus_sha256="0" * 64)),
        _fault(
            "another_dtype",
            REQUEST,
            "float32 against a float64 reference",
            _manifest(precision__dtype="float32"),
            whose=CANDIDATE,
        ),
        _fault("fewer_steps", REQUEST, "both stopped after 2 steps", _steps(lambda steps: steps[:2])),
        _fault(
            "repeated_steps", REQUEST, "step numbers repeat", _steps(lambda steps: [*steps[:2], *steps[:-2]])
        ),
        _fault("wrong_lr", REQUEST, "another learning rate from step 1 on", _scaled("lr", first=1)),
        _fault("diverged", REQUEST, "the loss is not a number", _scaled("loss", first=1, by=float("nan"))),
        _fault("no_tensors", REQUEST, "a recorder that leaves no tensors", _without(*Rung)),
        *(_fault(f"no_{rung}", REQUEST, f"both lack {rung}", _without(rung)) for rung in Rung),
        _fault("lacking_tensor", REQUEST, "both lack one gradient", _tensors(Rung.GRADIENTS, _lacking)),
        _fault("misnamed_tensor", REQUEST, "both misname one gradient", _tensors(Rung.GRADIENTS, _misnamed)),
        _fault("flat_tensors", REQUEST, "weights of another shape", _tensors(Rung.FIRST_WEIGHTS, _flattened)),
        _fault("rounded_tensors", REQUEST, "moments in float16", _tensors(Rung.FIRST_V, _in_float16)),
        _fault("zero_gradients", REQUEST, "all gradients are zero", _tensors(Rung.GRADIENTS, _zero)),
        _fault("trained_nothing", REQUEST, "the first step moves no weight", _train_nothing),
        _fault("other_weights", "initial_weights", "they begin with other weights", _begin_elsewhere),
        _fault("wrong_norm", "grad_norm", "a norm that is not the gradients'", _scaled("grad_norm", first=0)),
        _fault(
            "wrong_later_norm",
            "norm_curve",
            "a wrong norm after step 0",
            _scaled("grad_norm", first=1),
            whose=CANDIDATE,
        ),
        _fault("wrong_update", "first_update", "both round their weights to 16 bits", _round_first_weights),
        _fault(
            "no_last_update",
            FINAL,
            "the last step moves no weight",
            _tensors(Rung.FINAL_WEIGHTS, _zero),
            whose=CANDIDATE,
        ),
        _fault(
            "reference_alone",
            REQUEST,
            "the reference's learning rate is wrong",
            _scaled("lr", first=1),
            whose=REFERENCE,
        ),
        _fault(
            "another_batch",
            REQUEST,
            "both are to guess the tokens that they were given",
            _tensors(Rung.BATCH, lambda named: named | {"targets": named["inputs"]}),
        ),
        _fault("negative_times", REQUEST, "steps of less than no time", _each(step_time_ms=-1.0)),
        _fault("other_throughput", REQUEST, "tokens/s that do not fit the times", _each(tokens_per_s=1.0)),
        _fault("all_watched", REQUEST, "every step is the watched one", _each(instrumented=True)),
        _fault("no_memory", REQUEST, "devices that held nothing", _without_memory),
        _fault("other_axis", REQUEST, "gradients over an axis that the layout has not", _ledger(axis=TP)),
        _fault("turned_query_bias", LATER, "a query bias turned round", _turn_query_bias, whose=CANDIDATE),
        _fault(
            "better_validation",
            EVALUATIONS,
            "validation losses 10 % lower",
            _evaluations(_better_validation),
            whose=CANDIDATE,
        ),
        _fault("lacking_evaluation", REQUEST, "both lack the last evaluation", _evaluations(_lacking_last)),
        _fault("no_work", STRATEGY, "neither says what it computed", _without_work),
        _fault("other_products", STRATEGY, "products in bfloat16", _work(products={"bfloat16": 9})),
        _fault(
            "reference_products",
            STRATEGY,
            "the reference's products are in bfloat16",
            _work(products={"bfloat16": 9}),
            whose=REFERENCE,
        ),
        _fault("other_remat", STRATEGY, "all is computed again", _work(again=["activations", "products"])),
        _fault("whole_logits", STRATEGY, "logits of other positions", _work(logits_positions=[1])),
        _fault("other_sync", STRATEGY, "gradients in 99 messages", _ledger(calls=99)),
        _fault("other_messages", STRATEGY, "gradients sent in bfloat16", _ledger(dtype="bfloat16")),
        _fault("incomplete_ledger", STRATEGY, "a ledger that is not complete", _with_a_problem),
        _fault(
            "other_hosts",
            STRATEGY,
            "its devices were on two hosts, and nothing crossed",
            _manifest(hosts=["one", "another"]),
        ),
        _fault("held_more", STRATEGY, "optimizer state twice as large", _held_twice),
        _fault("failed_as_well", READING, "an error.json beside the manifest", _failed_as_well),
        _fault("no_steps", READING, "an emptied steps file", _garble(files.STEPS, lambda text: b"")),
        _fault(
            "garbled_tensors",
            READING,
            "a torn file of tensors",
            _garble(f"{Rung.GRADIENTS}.safetensors", lambda content: content[: len(content) // 2]),
        ),
    )
}
