"""Ledger of a function or a module, and the assertion of expected communication.

ledger = jaxpar.ledger(step, *arguments, mesh=mesh)        # any function that JAX can jit
with torchpar.ledger(mesh=mesh) as ledger:                 # any module and its wrappers
    loss(model(x)).backward()

print(ledger)
assert_communication(ledger, {("all_reduce", "data"): 4 * parameters})
"""

from collections.abc import Mapping

from msgspec import Struct, field

from compare.contract.communication import Communication

SCALAR = 8
"""Bytes: of a float64."""
WORLD = "world"
"""Axis of PyTorch's default group, if no mesh names it."""
LONGEST_SOURCE = 100
"""Characters of a source in an error; a longer one is shown without its operation."""

Expected = Mapping[tuple[str, ...], float | None]
"""Logical bytes by (kind, axis) or (kind, axis, purpose); None for any."""


class UnexpectedCommunicationError(AssertionError):
    """Difference between a ledger and the expectation. The message has one line per difference, with its
    source."""


class Ledger(Struct, kw_only=True):
    """Observed communication, one row per place in the program.

    Logical bytes are the size of the full (gathered) tensor, on one device, in one call of the function or
    within the context.
    """

    rows: list[Communication] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Messages that could not be counted, with their places. A ledger with problems is incomplete."""

    def __str__(self) -> str:
        """A line for each row, then what is missing."""
        lines = [("operation", "axis", "ranks", "calls", "bytes", "dtype", "phase", "for", "source")]
        for row in self.rows:
            figures = (str(row.group_size), f"{row.calls:,}", f"{row.bytes:,}")
            lines.append((row.kind, row.axis, *figures, row.dtype, row.phase, row.purpose, row.source))
        form = "{:<15} {:<14} {:>5} {:>6} {:>14} {:<9} {:<9} {:<22} {}"
        problems = (f"INCOMPLETE: {problem}" for problem in self.problems)
        return "\n".join([*(form.format(*line).rstrip() for line in lines), *problems])


def assert_communication(ledger: Ledger, expected: Expected, *, scalars: bool = False) -> None:
    """Check that exactly the expected communication happened.

    With `scalars` single numbers count, too: messages of one number, and numbers that XLA combined with other
    arrays in one message.

    Raises UnexpectedCommunicationError: a message is missing or unexpected, or has another size, or the
    ledger is incomplete.
    """
    rows = [row for row in ledger.rows if scalars or row.bytes > SCALAR * row.calls]
    asked = {
        key: [row for row in rows if key == (row.kind, row.axis, row.purpose)[: len(key)]] for key in expected
    }
    matched = {id(row) for found in asked.values() for row in found}
    lines = [f"unexpected: {_in_words(row)}" for row in rows if id(row) not in matched]
    for key, size in expected.items():
        found, name = asked[key], f"{key[0]} over {' for '.join(key[1:])}"
        total = sum(row.bytes if scalars else row.bytes - row.scalars for row in found)
        if not found:
            lines.append(f"missing: {name}" + (f", {size:,.0f} bytes" if size is not None else ""))
        elif size is not None and total != size:
            lines.append(f"{name}: {total:,} bytes instead of {size:,.0f}:")
            lines += [f"    {_in_words(row)}" for row in found]
    if lines and any(row.axis == WORLD for row in rows) and not any(WORLD in key for key in expected):
        lines.append(
            f"{WORLD} is PyTorch's default group: torchpar.ledger(mesh=mesh) names it after its axis"
        )
    lines += [f"incomplete: {problem}" for problem in ledger.problems]
    if lines:
        raise UnexpectedCommunicationError("\n".join(lines))


def _in_words(row: Communication) -> str:
    times = "once" if row.calls == 1 else f"{row.calls} times"
    of = f", for {row.purpose}" if row.purpose else ""
    source = row.source if len(row.source) <= LONGEST_SOURCE else row.source.partition(": ")[0]
    where = f", from {source}" if source else ""
    return f"{row.kind} over {row.axis} {times}, {row.bytes:,} bytes{of}{where}"
