"""`make constraints`: what one constraint more or less costs under XLA; docs/data/constraints.json.

    python docs/constraints.py tp_sp        # of some layouts; the others stay as they are

Steps of `check` for four devices, compiled and not run: jax-compiler's as it is, and without one of its
constraints; jax-explicit's beside it, which has none. What each device would send is read from the program.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import msgspec
from msgspec import Struct

from compare.show.markdown import markdown_rows as markdown
from compare.spec.engines.registry import STUDIED
from compare.spec.experiment import Layout, edited, load
from compare.studies.presets import PRESETS, preset_layout
from jaxpar.comm.mesh import make_mesh
from jaxpar.compilation import compile_step
from jaxpar.compiler import data_parallel, fully_sharded, tensor_parallel
from jaxpar.measure.ledger import communications
from jaxpar.model import Linear
from jaxpar.remat import resolve_remat
from jaxpar.setup import prepare

KEPT = Path(__file__).parent / "data" / "constraints.json"
TOLD, TYPED = (next(name for name, e in STUDIED.items() if e.sends_by == by) for by in ("xla", "types"))
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")
AS_IT_IS = "as it is"
NONE = "\N{EN DASH}"

Plant = Callable[[], AbstractContextManager[Any]]


class Priced(Struct, frozen=True, kw_only=True):
    """A step, and what a device sends in it."""

    layout: str
    engine: str
    words: str
    """What is left out, with the line that says it."""
    calls: dict[str, int]
    """By kind; scalars that go alone left out."""
    bytes: dict[str, int]
    wire: int
    """Bytes that a device sends on a ring."""


def variants() -> Iterator[tuple[str, str, str, Plant]]:
    """Layout, engine, what is left out, and how."""
    of_scatter = partial(patch.object, fully_sharded, "shard_parameters", lambda tree, placements, mesh: tree)
    of_gather = partial(
        patch.object,
        fully_sharded,
        "gather",
        lambda params, placements, mesh: fully_sharded.unpad(params, placements),
    )
    of_replicas = partial(
        patch.object, data_parallel, "synchronize_gradients", lambda of, params, batch, **_: of(params, batch)
    )
    joined = partial(patch.object, tensor_parallel.PlacedLinear, "product", Linear.product)
    everywhere = partial(patch.object, tensor_parallel, "placed", lambda x, mesh, split=None: x)
    yield "ddp", TOLD, AS_IT_IS, nullcontext
    yield "ddp", TOLD, f"no dim of replicas ({_place(data_parallel.synchronize_gradients)})", of_replicas
    yield "ddp", TYPED, AS_IT_IS, nullcontext
    yield "fsdp", TOLD, AS_IT_IS, nullcontext
    yield (
        "fsdp",
        TOLD,
        f"no layer says that it wants its weights whole ({_place(fully_sharded.gather)})",
        of_gather,
    )
    yield (
        "fsdp",
        TOLD,
        f"gradients and updates may be whole ({_place(fully_sharded.shard_parameters)})",
        of_scatter,
    )
    yield "fsdp", TYPED, AS_IT_IS, nullcontext
    for layout in ("tp", "tp_sp", "fsdp_tp"):
        yield layout, TOLD, AS_IT_IS, nullcontext
        for line in _sites():
            yield layout, TOLD, f"tensor_parallel.py:{line}", partial(_without, line)
        yield (
            layout,
            TOLD,
            f"no activation says where it lives ({_place(tensor_parallel.placed)})",
            everywhere,
        )
        yield layout, TOLD, f"q, k, v as one matrix ({_place(tensor_parallel.PlacedLinear.product)})", joined
        yield layout, TYPED, AS_IT_IS, nullcontext


def _place(what: Callable[..., Any]) -> str:
    return f"{Path(inspect.getfile(what)).name}:{inspect.getsourcelines(what)[1]}"


def _sites() -> list[int]:
    """Lines of the lesson that say where an activation lives."""
    lines = Path(inspect.getfile(tensor_parallel)).read_text(encoding="utf-8").splitlines()
    return [
        number
        for number, line in enumerate(lines, start=1)
        if re.search(r"\bplaced\(", line) and "def " not in line
    ]


def _without(line: int) -> AbstractContextManager[Any]:
    """Nothing is said on this line."""
    right = tensor_parallel.placed

    def placed(x: jax.Array, mesh: Any, *, split: int | None = None) -> jax.Array:
        caller = inspect.currentframe()
        assert caller is not None
        assert caller.f_back is not None
        return x if caller.f_back.f_lineno == line else right(x, mesh, split=split)

    return patch.object(tensor_parallel, "placed", placed)


def price(layout: str, engine: str, words: str, plant: Plant) -> Priced:
    """Compile a step, and read what it sends."""
    placed = preset_layout(Layout(), layout, PRESETS[layout].devices)
    experiment = edited(load("check"), {"layout": msgspec.structs.asdict(placed)})
    mesh = make_mesh(placed, platform="cpu")
    with plant():
        sharded, state = prepare(engine, experiment, mesh=mesh, remat=resolve_remat(placed))
        hlo = compile_step(sharded, state, experiment).as_text()
    assert hlo
    calls, size, wire = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0), 0
    for row in communications(hlo, mesh.shape):
        if row.purpose != "metrics":
            calls[row.kind] += row.calls
            size[row.kind] += row.bytes
            wire += row.wire_bytes
    return Priced(layout=layout, engine=engine, words=words, calls=calls, bytes=size, wire=wire)


def section() -> str:
    """A row for all steps of a layout that send the same: calls and bytes by kind, and the wire beside it."""
    alike: dict[tuple[Any, ...], list[str]] = {}
    first: dict[str, int] = {}
    for one in read_priced():
        beside = first.setdefault(one.layout, one.wire)
        sent = (f"{one.bytes[k]:,} in {one.calls[k]:,}" if one.calls[k] else NONE for k in KINDS)
        row = f"`{one.layout}`", f"`{one.engine}`", *sent, f"{one.wire / beside:.2f}"
        alike.setdefault(row, []).append(one.words)
    rows = [(layout, engine, "; ".join(words), *sent) for (layout, engine, *sent), words in alike.items()]
    header = ["layout", "engine", "left out", *(k.replace("_", "-") for k in KINDS), "on the wire"]
    return markdown(header, rows, numbers_from=4)


def read_priced() -> list[Priced]:
    """What is kept; nothing before the first `make constraints`."""
    return msgspec.json.decode(KEPT.read_bytes(), type=list[Priced]) if KEPT.is_file() else []


def main(layouts: Sequence[str]) -> int:
    """Price the steps of these layouts, or of all, and keep it. Returns the exit code."""
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_enable_x64", True)
    known = dict.fromkeys(layout for layout, *_ in variants())
    if unknown := [name for name in layouts if name not in known]:
        print(f"{unknown[0]}: no such layout (there are {', '.join(known)})", file=sys.stderr)
        return 2
    for layout in layouts or known:
        rows = {layout: [price(*variant) for variant in variants() if variant[0] == layout]}
        kept = {name: [one for one in read_priced() if one.layout == name] for name in known} | rows
        written = KEPT.with_suffix(".tmp")
        lines = ",\n".join(msgspec.json.encode(one).decode() for of in kept.values() for one in of)
        written.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        written.rename(KEPT)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
