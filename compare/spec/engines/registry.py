"""All sides and engines: ours, and those of installed packages that declare one.

A package joins by an entry point in the group `shardpair.sides` that names its `Side`:

    [project.entry-points."shardpair.sides"]
    numpypar = "numpypar.declaration:SIDE"

The module it names is imported here, so it imports the contract and nothing heavy; the package itself runs as
`python -m numpypar RUN_DIR`, in a process of its own.
"""

from importlib.metadata import EntryPoint, entry_points

from compare.spec.engines.engine import Engine, Side
from compare.spec.engines.jax import JAX
from compare.spec.engines.torch import TORCH

GROUP = "shardpair.sides"


def read_declarations(ours: tuple[Side, ...], others: list[EntryPoint]) -> tuple[dict[str, Side], list[str]]:
    """The sides by name, and why others that are declared are left out, a line each.

    A package that is broken, or takes a name that is taken, must not keep the rest from running.
    """
    sides, objections = {side.name: side for side in ours}, []
    for point in sorted(others, key=lambda point: point.name):
        what = f"the side {point.name} ({point.value}) is left out"
        try:
            side = point.load()
        except Exception as error:
            objections.append(f"{what}: {type(error).__name__}: {' '.join(str(error).split())}")
            continue
        if why := _objection(side, sides):
            objections.append(f"{what}: {why}")
        else:
            sides[side.name] = side
    return sides, objections


def _objection(side: object, sides: dict[str, Side]) -> str:
    if not isinstance(side, Side):
        return f"it is a {type(side).__name__}, and no compare.spec.engines.engine.Side"
    taken = {engine.name for other in sides.values() for engine in (*other.engines, *other.peers)}
    if side.name in sides or side.python_flag in {other.python_flag for other in sides.values()}:
        return f"its name {side.name} or its flag {side.python_flag} is taken"
    for engine in (*side.engines, *side.peers):
        if engine.name in taken:
            return f"its engine {engine.name} has a name that is taken"
        if engine.side != side.name or engine.is_reference:
            return f"its engine {engine.name} must have side = {side.name} and not be the reference"
    return ""


SIDES, OBJECTIONS = read_declarations((JAX, TORCH), list(entry_points(group=GROUP)))
STUDIED: dict[str, Engine] = {engine.name: engine for side in SIDES.values() for engine in side.engines}
"""The engines that this is about: what a command runs by default, and what tables and counts are of."""
PEERS: dict[str, Engine] = {engine.name: engine for side in SIDES.values() for engine in side.peers}
"""What others use for the same, to be run beside them when it is named."""
ENGINES = STUDIED | PEERS
"""All that can be named."""
(REFERENCE,) = (engine.name for engine in ENGINES.values() if engine.is_reference)
"""The engine whose run on one device is what all others are held against."""


def side_of(engine: str) -> Side:
    """The side that runs an engine."""
    return SIDES[ENGINES[engine].side]
