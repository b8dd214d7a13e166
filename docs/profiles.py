"""`make profiles`: where the time of jaxpar's steps goes; docs/profiles.json, for docs/performance.md.

    python docs/profiles.py jax-manual zero1 4        # one of them, printed and not kept

Times are of XLA's operations, from jax.profiler, over some steps after the first ones; an operation that
waits for other devices counts as long as it waits. On an idle machine.
"""

import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import msgspec
from msgspec import Struct

from compare.contract.engines.registry import SIDES
from compare.execute.launch import child_environment

PROFILES = Path(__file__).parent / "profiles.json"
CASES = (
    ("jax-manual", "single", 1),
    ("jax-manual", "ddp", 4),
    ("jax-manual", "zero1", 4),
    ("jax-manual", "fsdp", 4),
    ("jax-manual", "tp", 2),
    ("jax-compiler", "zero1", 4),
)
CLASSES = {
    "linear layers": "products of linear layers",
    "attention": "products of attention",
    "elementwise": "elementwise work of the model",
    "optimizer": "norm, clipping and optimizer",
    "copies": "copies and fills",
    "collectives": "collectives, waiting included",
}
WARMUP, STEPS = 4, 4
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"(?<=[\])}] )([a-z][\w\-]*)\(")
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_OP_NAME = re.compile(r'op_name="([^"]*)"')


class Profile(Struct, frozen=True, kw_only=True):
    """One step of one case. Times are in milliseconds."""

    engine: str
    preset: str
    devices: int
    wall_ms: float
    cpu_ms: float
    """Of all devices, before the profiler was on."""
    operations_ms: dict[str, float]
    """By `CLASSES`, summed over devices."""


def read_profiles() -> list[Profile]:
    """What is stored; [] before the first `make profiles`."""
    return msgspec.json.decode(PROFILES.read_bytes(), type=list[Profile]) if PROFILES.is_file() else []


def classes_of(hlo: str) -> dict[str, str]:
    """The class of every operation of a compiled module, by its name."""
    bodies: dict[str, list[str]] = {}
    found: dict[str, tuple[str, str]] = {}
    computation = ""
    for line in hlo.splitlines():
        if header := _HEADER.match(line):
            computation = header[1]
        elif instruction := _INSTRUCTION.match(line):
            opcode = _OPCODE.search(instruction[2])
            bodies.setdefault(computation, []).append(opcode[1] if opcode else "")
            found[instruction[1]] = (opcode[1] if opcode else "", instruction[2])
    return {name: _class(opcode, text, bodies) for name, (opcode, text) in found.items()}


def _class(opcode: str, text: str, bodies: dict[str, list[str]]) -> str:
    called = re.search(r"calls=%?([\w.\-]+)", text)
    inside = bodies.get(called[1], []) if called else []
    op_name = _OP_NAME.search(text)
    name = op_name[1] if op_name else ""
    if opcode.startswith(("all-", "reduce-scatter", "collective-")):
        return "collectives"
    if opcode == "dot" or "dot" in inside or (opcode == "custom-call" and "dot" in name):
        return "attention" if "BH" in name else "linear layers"
    if opcode in ("copy", "broadcast", "transpose") or (inside and set(inside) <= _MOVES):
        return "copies"
    return "elementwise" if "jvp" in name or "transpose(" in name else "optimizer"


_MOVES = {"parameter", "constant", "copy", "broadcast", "transpose", "bitcast", "reshape", "slice", ""}


def measure(engine: str, preset: str, devices: int) -> Profile:
    """Train some steps in this process, which has not used JAX yet."""
    from compare.contract.experiment import edited, load
    from compare.contract.request import Request
    from compare.studies.presets import spread
    from jaxpar.__main__ import configure_jax

    sizes = {"model": {"block_size": 128}, "train": {"batch_size": 8}, "data": {"source": "synthetic"}}
    experiment = spread(edited(load("baby-gpt"), sizes), preset, devices)
    configure_jax(Request(engine=engine, experiment=experiment))

    import jax

    from compare.contract.data import open_corpus
    from compare.contract.host.facts import cpu_seconds
    from compare.contract.progress import Progress
    from compare.contract.stream import arrays_of_step
    from jaxpar.comm.mesh import make_mesh
    from jaxpar.compilation import compile_step, device_scalars
    from jaxpar.remat import resolve_remat
    from jaxpar.train import prepare

    mesh = make_mesh(experiment.layout, platform="cpu")
    remat = resolve_remat(experiment.layout)
    sharded, state = prepare(engine, experiment, mesh=mesh, remat=remat)
    compiled, corpus = compile_step(sharded, state, experiment), open_corpus(experiment)

    def steps(first: int) -> tuple[float, float]:
        begun, cpu_begun = time.perf_counter(), cpu_seconds()
        for number in range(first, first + STEPS):
            batch = jax.device_put(arrays_of_step(corpus, experiment, number), sharded.batch)
            scalars = device_scalars(experiment, Progress(updates=number))
            state.params, state.opt_state, _, _ = compiled(state.params, state.opt_state, batch, scalars)
        jax.block_until_ready(state.params)
        return (time.perf_counter() - begun) / STEPS, (cpu_seconds() - cpu_begun) / STEPS

    steps(0)
    wall_s, cpu_s = steps(WARMUP)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            steps(WARMUP + STEPS)
        (path,) = Path(folder).rglob("*.xplane.pb")
        traced = jax.profiler.ProfileData.from_file(str(path))
    hlo = compiled.as_text()
    assert hlo
    named, found = classes_of(hlo), Counter(dict.fromkeys(CLASSES, 0.0))
    for event in (event for plane in traced.planes for line in plane.lines for event in line.events):
        operation = dict(event.stats).get("hlo_op")
        if operation in named:
            found[named[operation]] += event.duration_ns / 1e6 / STEPS
    return Profile(
        engine=engine,
        preset=preset,
        devices=devices,
        wall_ms=wall_s * 1e3,
        cpu_ms=cpu_s * 1e3,
        operations_ms=dict(found),
    )


def main(arguments: list[str]) -> None:
    """Measure one case and print it, or all of them, each in a process of its own, and keep them."""
    if arguments:
        engine, preset, devices = arguments
        print(msgspec.json.encode(measure(engine, preset, int(devices))).decode())
        return
    found = []
    for case in CASES:
        command = [sys.executable, __file__, *map(str, case)]
        environment = child_environment(SIDES["jaxpar"], "cpu")  # memory in huge pages, as in a run
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        found.append(msgspec.json.decode(done.stdout, type=Profile))
        print(found[-1], file=sys.stderr, flush=True)
    PROFILES.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
