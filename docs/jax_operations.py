"""Where the time of a step of jaxpar goes: XLA's operations by class; for docs/profiles.py."""

import re
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

from profiles import JAX_CLASSES, Case

WARMUP, STEPS, ROUNDS = 4, 4, 5
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"(?<=[\])}] )([a-z][\w\-]*)\(")
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_OP_NAME = re.compile(r'op_name="([^"]*)"')


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


def measured(case: Case) -> dict[str, Any]:
    """Figures of a `Profile`: some steps in this process, which has not used JAX yet."""
    from compare.contract.request import Request
    from jaxpar.__main__ import configure_jax

    experiment = case.experiment
    configure_jax(Request(engine=case.engine, experiment=experiment))

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
    sharded, state = prepare(case.engine, experiment, mesh=mesh, remat=remat)
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
        found.append(Counter(dict.fromkeys(JAX_CLASSES, 0.0)))
        for event in (event for plane in traced.planes for line in plane.lines for event in line.events):
            operation = dict(event.stats).get("hlo_op")
            if operation in named:
                found[-1][named[operation]] += event.duration_ns / 1e6 / STEPS
    return {
        "wall_ms": median(walls) * 1e3,
        "cpu_ms": median(cpus) * 1e3,
        "operations_ms": {kind: median(one[kind] for one in found) for kind in JAX_CLASSES},
    }
