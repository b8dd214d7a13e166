"""`make counts`: how often every collective of jaxpar's layouts ran, by the profiler, against the ledger.

    python docs/dynamic_counts.py jax-manual fsdp_pp        # one of them, printed and not kept

The ledger of a JAX engine is read from the text of the compiled step; here the step runs, and its executions
are counted. Every preset that an engine does not refuse, on a model of a second; docs/dynamic_counts.json.
"""

import sys
from pathlib import Path

import msgspec
from msgspec import Struct

from compare.contract.request import Request
from compare.spec.experiment import Data, Experiment, Model, Train
from compare.studies.matrix import matrix_cases
from compare.studies.presets import PRESETS
from jaxpar.measure.dynamic_counts import Counted, dynamic_counts
from jaxpar.measure.profile_events import Executions

COUNTS = Path(__file__).parent / "dynamic_counts.json"
NAMES = ("jax-compiler", "jax-manual")
DEVICES = max(preset.devices for preset in PRESETS.values())
EXPERIMENT = Experiment(
    model=Model(n_layer=4, n_head=4, n_embd=16, block_size=8, vocab_size=65, bias=True),
    data=Data(source="synthetic"),
    train=Train(max_iters=2, batch_size=8, gradient_accumulation_steps=2),
)


class LayoutCounts(Struct, frozen=True, kw_only=True):
    """One layout of one engine."""

    engine: str
    preset: str
    schedule: str
    """Of a pipeline: GPipe where the engine lacks that of a composition."""
    devices: int
    agrees: bool
    """Every instruction ran as often as the ledger says."""
    rows: list[Counted]


def read_counts() -> list[LayoutCounts]:
    """What is stored; [] before the first `make counts`."""
    return msgspec.json.decode(COUNTS.read_bytes(), type=list[LayoutCounts]) if COUNTS.is_file() else []


def watch(engine: str, experiment: Experiment) -> tuple[Executions, str]:
    """Two steps in this process, the second of them watched; and the HLO that ran. JAX has its devices."""
    import jax

    from compare.contract.progress import Progress
    from compare.numerics.data import open_corpus
    from compare.numerics.stream import arrays_of_step
    from jaxpar.comm.mesh import make_mesh
    from jaxpar.compilation import compile_step, device_scalars
    from jaxpar.measure.profile import recorded
    from jaxpar.remat import resolve_remat
    from jaxpar.setup import prepare

    layout = experiment.layout
    mesh = make_mesh(layout, platform="cpu")
    sharded, state = prepare(engine, experiment, mesh=mesh, remat=resolve_remat(layout))
    compiled, corpus = compile_step(sharded, state, experiment), open_corpus(experiment)
    hlo = compiled.as_text()
    assert hlo

    def step(number: int) -> None:
        batch = jax.device_put(arrays_of_step(corpus, experiment, number), sharded.batch)
        scalars = device_scalars(experiment, Progress(updates=number))
        outputs = compiled(state.params, state.opt_state, batch, scalars)
        state.params, state.opt_state, _, _ = jax.block_until_ready(outputs)

    step(0)
    with recorded(hlo, list(mesh.devices.flat)) as found:
        step(1)
    return found[0], hlo


def cases() -> dict[tuple[str, str], Experiment]:
    """The experiments by (engine, preset), as the parity matrix has them: all that the engines express."""
    found, cells = matrix_cases(EXPERIMENT, list(NAMES), list(PRESETS))
    named = {case.name: case.experiment for case in found}
    names = {(engine, preset): f"{engine}.{preset}" for preset, engine in cells}
    return {cell: named[name] for cell, name in names.items() if name in named}


def count_layout(engine: str, preset: str, experiment: Experiment) -> LayoutCounts:
    """One layout."""
    layout = experiment.layout
    executions, hlo = watch(engine, experiment)
    rows = dynamic_counts(executions.events, hlo, layout.axes)
    return LayoutCounts(
        engine=engine,
        preset=preset,
        schedule=layout.schedule if layout.pp > 1 else "",
        devices=layout.devices,
        agrees=not any(row.differences for row in rows),
        rows=rows,
    )


def main(arguments: list[str]) -> None:
    """Count one layout and print it, or all, and keep them."""
    from jaxpar.__main__ import configure_devices, configure_jax

    configure_jax(Request(engine=NAMES[0], experiment=EXPERIMENT))
    configure_devices("cpu", DEVICES)
    todo = cases()
    if arguments:
        engine, preset = arguments
        found = count_layout(engine, preset, todo[engine, preset])
        print(msgspec.json.format(msgspec.json.encode(found), indent=1).decode())
        return
    kept = []
    for (engine, preset), experiment in todo.items():
        kept.append(count_layout(engine, preset, experiment))
        print(engine, preset, "agrees" if kept[-1].agrees else "DIFFERS", file=sys.stderr, flush=True)
    lines = b",\n".join(msgspec.json.encode(one) for one in kept)  # a layout a line
    COUNTS.write_bytes(b"[\n" + lines + b"\n]\n")


if __name__ == "__main__":
    main(sys.argv[1:])
