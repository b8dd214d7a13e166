"""Damage done to the record of a run: each is called with the folder of an engine."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import numpy as np

from compare.contract import record as files
from compare.contract.communication import GRADIENTS
from compare.contract.record import Step, read_steps, read_tensors
from compare.contract.request import Rung
from compare.host.json_files import read_json
from compare.numerics.evaluation import Evaluation

SINGLE = "single"
"""The folder of a run on one device, beside the engine's."""

Damage = Callable[[Path], None]


def ignore_layout(folder: Path) -> None:
    """The record of a real run on one device, which answers the request for several."""
    asked = (folder / files.REQUEST).read_bytes()
    shutil.rmtree(folder)
    shutil.copytree(folder.parent / SINGLE, folder)
    (folder / files.REQUEST).write_bytes(asked)


def manifest(**fields: object) -> Damage:
    """Say something else in the manifest; fields of the experiment as section__key."""

    def damage(folder: Path) -> None:
        manifest = read_json(folder / files.MANIFEST, dict)
        for key, value in fields.items():
            section, _, field = key.partition("__")
            (manifest["experiment"][section] if field else manifest)[field or key] = value
        files.write_json(folder / files.MANIFEST, manifest)

    return damage


def steps(change: Callable[[list[Step]], list[Step]]) -> Damage:
    def damage(folder: Path) -> None:
        steps = change(read_steps(folder / files.STEPS))
        (folder / files.STEPS).write_bytes(b"".join(msgspec.json.encode(step) + b"\n" for step in steps))

    return damage


def scaled(field: str, *, first: int, by: float = 1.5) -> Damage:
    """A wrong figure from step `first` on."""
    return steps(
        lambda steps: [
            msgspec.structs.replace(step, **{field: by * getattr(step, field)})
            if step.step >= first
            else step
            for step in steps
        ]
    )


def tensors(rung: Rung, change: Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]]) -> Damage:
    return lambda folder: files.write_tensors(folder, rung, change(dict(read_tensors(folder, rung))))


def without(*rungs: Rung) -> Damage:
    def damage(folder: Path) -> None:
        for rung in rungs:
            (folder / f"{rung}.safetensors").unlink()

    return damage


def first_of(tensors: Mapping[str, np.ndarray]) -> str:
    return min(tensors)


def lacking(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: tensor for name, tensor in tensors.items() if name != first_of(tensors)}


def misnamed(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"{name}_" if name == first_of(tensors) else name: tensor for name, tensor in tensors.items()}


def flattened(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: tensor.reshape(-1) for name, tensor in tensors.items()}


def in_float16(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: tensor.astype(np.float16) for name, tensor in tensors.items()}


def zero(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.zeros_like(tensor) for name, tensor in tensors.items()}


def train_nothing(folder: Path) -> None:
    files.write_tensors(folder, Rung.FIRST_WEIGHTS, dict(read_tensors(folder, Rung.INITIAL_WEIGHTS)))


def begin_elsewhere(folder: Path) -> None:
    moved = {name: tensor + 1e-3 for name, tensor in read_tensors(folder, Rung.INITIAL_WEIGHTS).items()}
    files.write_tensors(folder, Rung.INITIAL_WEIGHTS, moved)
    manifest(initial_weights_sha256="0" * 64)(folder)


def garble(name: str, change: Callable[[bytes], bytes]) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return damage


def round_first_weights(folder: Path) -> None:
    """Keep of each weight the 8 bits of a bfloat16, and of a float64 as many."""

    def rounded(tensor: np.ndarray) -> np.ndarray:
        mantissa, exponent = np.frexp(tensor)
        return np.ldexp(np.round(mantissa * 256) / 256, exponent).astype(tensor.dtype)

    tensors(Rung.FIRST_WEIGHTS, lambda named: {name: rounded(one) for name, one in named.items()})(folder)


def turn_query_bias(folder: Path) -> None:
    """The query third of the bias, whose key third no rung after the gradients can hold."""

    def turned(named: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        name = next(name for name in named if name.endswith("qkv.bias"))
        query = np.concatenate([-named[name][:1], named[name][1:]])
        return named | {name: query}

    tensors(Rung.LATER_WEIGHTS, turned)(folder)


def evaluations(change: Callable[[list[Evaluation]], list[Evaluation]]) -> Damage:
    def damage(folder: Path) -> None:
        lines = (folder / files.EVALUATIONS).read_bytes().splitlines()
        changed = change([msgspec.json.decode(line, type=Evaluation) for line in lines])
        content = b"".join(msgspec.json.encode(one) + b"\n" for one in changed)
        (folder / files.EVALUATIONS).write_bytes(content)

    return damage


def each(**fields: object) -> Damage:
    """The same figure in every step."""
    return steps(lambda steps: [msgspec.structs.replace(step, **fields) for step in steps])


def lacking_last(done: list[Evaluation]) -> list[Evaluation]:
    return done[:-1]


def better_validation(done: list[Evaluation]) -> list[Evaluation]:
    return [msgspec.structs.replace(one, validation=one.validation * 0.9) for one in done]


def without_work(folder: Path) -> None:
    (folder / files.WORK).unlink()


def work(**fields: object) -> Damage:
    """Another figure in what was seen of the step."""

    def damage(folder: Path) -> None:
        files.write_json(folder / files.WORK, read_json(folder / files.WORK, dict) | fields)

    return damage


def ledger(**fields: object) -> Damage:
    """Another figure in the rows of gradients."""

    def damage(folder: Path) -> None:
        ledger = read_json(folder / files.LEDGER, dict)
        for row in ledger["rows"]:
            row |= fields if row["purpose"] == GRADIENTS else {}
        files.write_json(folder / files.LEDGER, ledger)

    return damage


def with_a_problem(folder: Path) -> None:
    ledger = read_json(folder / files.LEDGER, dict)
    files.write_json(folder / files.LEDGER, ledger | {"problems": ["something was sent that nobody saw"]})


def without_memory(folder: Path) -> None:
    held = read_json(folder / files.MANIFEST, dict)["peak_memory_bytes"]
    manifest(peak_memory_bytes=[0] * len(held))(folder)


def failed_as_well(folder: Path) -> None:
    (folder / files.ERROR).write_bytes(b"{}")


def held_twice(folder: Path) -> None:
    held = read_json(folder / files.MANIFEST, dict)["resident_bytes"]
    manifest(resident_bytes=held | {"optimizer": [2 * size for size in held["optimizer"]]})(folder)
