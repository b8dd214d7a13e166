"""Collective instructions that a compiler made of a step, as RUN_DIR/collectives.hlo.json.

Only an engine whose step is compiled leaves them. The ledger sums up the same instructions; here each says
which lines of the side cause it.
"""

from msgspec import Struct

HLO_COLLECTIVES = "collectives.hlo.json"


class Instruction(Struct, frozen=True, kw_only=True):
    """Collectives of the optimised program that one place causes: kind, axis and purpose are the ledger's."""

    kind: str
    axis: str
    purpose: str
    calls: int
    """Number of runs in a step."""
    bytes: int
    """Logical bytes of all its calls."""
    places: tuple[tuple[str, int], ...] = ()
    """The side's lines that cause it, the innermost first: ("jaxpar/manual/fully_sharded.py", 12)."""
