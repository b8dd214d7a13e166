"""`make profiles`: where the time of jaxpar's steps goes; docs/profiles.json, for docs/limits.md.

    python docs/profiles.py jax-manual zero1 4        # one of them, printed and not kept
    python docs/profiles.py jax-manual pp 4 8 16      # of 8 layers, with 16 microbatches

Times are of XLA's operations, from jax.profiler, over some steps after the first ones, each the median over
some profiles; an operation that waits for other devices counts as long as it waits. On an idle machine.
"""

import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median

import msgspec
from msgspec import Struct

from compare.execute.launch import child_environment
from compare.spec.engines.registry import SIDES

PROFILES = Path(__file__).parent / "profiles.json"
SIZES = {6: {"block_size": 128}, 8: {"block_size": 128, "n_layer": 8, "n_head": 8}}
BATCH = {6: 8, 8: 16}
"""By layers, as in the benches of docs/performance.py: four stages of a pipeline share eight."""
CASES = (
    ("jax-manual", "single", 1),
    ("jax-manual", "ddp", 4),
    ("jax-manual", "zero1", 4),
    ("jax-manual", "fsdp", 4),
    ("jax-manual", "tp", 2),
    ("jax-compiler", "zero1", 4),
    ("jax-manual", "single", 1, 8),
    ("jax-manual", "tp", 4, 8),
    ("jax-manual", "tp_sp", 4, 8),
    ("jax-manual", "single", 1, 8, 16),
    ("jax-manual", "pp", 4, 8, 4),
    ("jax-manual", "pp", 4, 8, 16),
)
"""Engine, preset, devices; layers, if not 6; microbatches, if not 1: one device accumulates them."""
CLASSES = {
    "linear layers": "products of linear layers",
    "attention": "products of attention",
    "elementwise": "elementwise work of the model",
    "optimizer": "norm, clipping and optimizer",
    "copies": "copies and fills",
    "collectives": "collectives, waiting included",
}
WARMUP, STEPS, ROUNDS = 4, 4, 5
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"(?<=[\])}] )([a-z][\w\-]*)\(")
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_OP_NAME = re.compile(r'op_name="([^"]*)"')


class Profile(Struct, frozen=True, kw_only=True):
    """One step of one case. Times are in milliseconds."""

    engine: str
    preset: str
    devices: int
    layers: int = 6
    microbatches: int = 1
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
    bodies: dict[str, list[str]] = {}  # opcodes of each computation
    found: dict[str, tuple[str, str]] = {}
    computation = ""
    for line in hlo.splitlines():
        if header := _HEADER.match(line):
            computation = header[1]
        elif instruction := _INSTRUCTION.match(line):
            matched = _OPCODE.search(instruction[2])
            opcode = matched[1] if matched else ""
            if opcode == "dot" and "lhs_batch_dims" in instruction[2]:
                opcode = "dot of batches"
            bodies.setdefault(computation, []).append(opcode)
            found[instruction[1]] = (opcode, instruction[2])
    return {
        name: _class(opcode, text, bodies)
        for name, (opcode, text) in found.items()
        if opcode not in _CONTROL_FLOW
    }


def _class(opcode: str, text: str, bodies: dict[str, list[str]]) -> str:
    called = re.search(r"calls=%?([\w.\-]+)", text)
    inside = bodies.get(called[1], []) if called else []
    op_name = _OP_NAME.search(text)
    name = op_name[1] if op_name else ""
    if opcode.startswith(("all-", "reduce-scatter", "collective-")):
        return "collectives"
    if "dot of batches" in (opcode, *inside):
        return "attention"
    if "dot" in (opcode, *inside) or (opcode == "custom-call" and "dot" in name):
        return "attention" if "BH" in name else "linear layers"
    if opcode in ("copy", "broadcast", "transpose") or (inside and set(inside) <= _MOVES):
        return "copies"
    return "elementwise" if "jvp" in name or "transpose(" in name else "optimizer"


_CONTROL_FLOW = {"while", "conditional", "call"}
"""They last as long as what runs in them, which is counted."""
_MOVES = {"parameter", "constant", "copy", "broadcast", "transpose", "bitcast", "reshape", "slice", ""}
_MOVES |= {"dynamic-slice", "dynamic-update-slice", "get-tuple-element"}


def measure(engine: str, preset: str, devices: int, layers: int = 6, microbatches: int = 1) -> Profile:
    """Train some steps in this process, which has not used JAX yet."""
    from compare.contract.request import Request
    from compare.spec.experiment import edited, load
    from compare.studies.presets import spread
    from jaxpar.__main__ import configure_jax

    passes = microbatches if devices == 1 else 1
    batch = {"batch_size": BATCH[layers] // passes, "gradient_accumulation_steps": passes}
    sizes = {"model": SIZES[layers], "train": batch, "data": {"source": "synthetic"}}
    experiment = spread(edited(load("baby-gpt"), sizes), preset, devices)
    experiment = edited(experiment, {"layout": {"microbatches": microbatches // passes}})
    configure_jax(Request(engine=engine, experiment=experiment))

    import jax

    from compare.contract.progress import Progress
    from compare.host.facts import cpu_seconds
    from compare.numerics.data import open_corpus
    from compare.numerics.stream import arrays_of_step
    from jaxpar.comm.mesh import make_mesh
    from jaxpar.compilation import compile_step, device_scalars
    from jaxpar.remat import resolve_remat
    from jaxpar.setup import prepare

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
    walls, cpus = zip(*(steps(WARMUP + STEPS * turn) for turn in range(ROUNDS)), strict=True)
    hlo = compiled.as_text()
    assert hlo
    named, found = classes_of(hlo), []
    for turn in range(ROUNDS, 2 * ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                steps(WARMUP + STEPS * turn)
            (path,) = Path(folder).rglob("*.xplane.pb")
            traced = jax.profiler.ProfileData.from_file(str(path))
        found.append(Counter(dict.fromkeys(CLASSES, 0.0)))
        for event in (event for plane in traced.planes for line in plane.lines for event in line.events):
            operation = dict(event.stats).get("hlo_op")
            if operation in named:
                found[-1][named[operation]] += event.duration_ns / 1e6 / STEPS
    return Profile(
        engine=engine,
        preset=preset,
        devices=devices,
        layers=layers,
        microbatches=microbatches,
        wall_ms=median(walls) * 1e3,
        cpu_ms=median(cpus) * 1e3,
        operations_ms={kind: median(one[kind] for one in found) for kind in CLASSES},
    )


def main(arguments: list[str]) -> None:
    """Measure one case and print it, or all of them, each in a process of its own, and keep them."""
    if arguments:
        engine, preset, *numbers = arguments
        print(msgspec.json.encode(measure(engine, preset, *map(int, numbers))).decode())
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
