"""Collective instructions that a compiler made of a step, as RUN_DIR/collectives.hlo.json.

Only an engine whose step is compiled leaves them. The ledger sums up the same instructions; here each one
says where in the program it comes from.
"""

from msgspec import Struct

HLO_COLLECTIVES = "collectives.hlo.json"


class SourceLine(Struct, frozen=True):
    """A line of a source file."""

    file: str
    """Its path; in the file relative to the folder of the packages: jaxpar/manual/fully_sharded.py."""
    line: int
    function: str = ""

    def __str__(self) -> str:
        """file.py:12 (function), the file without its folders."""
        where = f"{self.file.rpartition('/')[2]}:{self.line}"
        return f"{where} ({self.function})" if self.function else where


class Instruction(Struct, frozen=True, kw_only=True):
    """One collective of the optimised program, or several that differ only in their names."""

    kind: str
    """Kind of collective; kind, axis and purpose are the ledger's."""
    axis: str
    purpose: str
    operation: str
    """Name in the compiled program: all-reduce, collective-permute-start."""
    result: str
    """Dtypes and shapes of its result on one device, without memory layouts: f64[4,96]."""
    groups: str
    """Devices that speak with each other, by their places in the mesh: {{0,1},{2,3}}; of a permute from
    where to where."""
    op_name: str = ""
    """Path of scopes and transforms in the source program."""
    calls: int
    """Number of runs in a step."""
    bytes: int
    """Logical bytes of all its calls."""
    stack: tuple[SourceLine, ...] = ()
    """The side's own lines that caused it, the innermost first, without what starts any step; () if the
    compiler does not tell."""
