"""Ledger of a function or a module, and the assertion of expected communication.

ledger = jaxpar.ledger(step, *arguments, mesh=mesh)        # any function that JAX can jit
with torchpar.ledger() as ledger:                          # any module and its wrappers
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

    Single numbers, such as a loss, may be counted or not, alone or together with other arrays in one message.
    With `scalars` they count as any array.

    Raises UnexpectedCommunicationError: a message is missing or unexpected, or has another size, or the
    ledger is incomplete.
    """
    __tracebackhide__ = True
    rows = [row for row in ledger.rows if row.bytes]
    asked = {
        key: [row for row in rows if key == (row.kind, row.axis, row.purpose)[: len(key)]] for key in expected
    }
    matched = {id(row) for found in asked.values() for row in found}
    surprises = [row for row in rows if id(row) not in matched and (scalars or row.bytes > row.scalars)]
    lines = [f"unexpected: {_in_words(row)}" for row in surprises]
    for key, size in expected.items():
        found, name = asked[key], f"{key[0]} over {' for '.join(key[1:])}"
        total, single = sum(row.bytes for row in found), sum(row.scalars for row in found)
        least = total if scalars else total - single
        if not found or (size is None and not least):
            lines.append(f"missing: {name}" + (f", {size:,.0f} bytes" if size is not None else ""))
        elif size is not None and not least <= size <= total:
            lines.append(
                f"{name}: {total:,} bytes{_of_which(single)} instead of {size:,.0f}{_times(least, size)}:"
            )
            lines += [f"    {_in_words(row)}" for row in found]
    if lines and any(row.axis == WORLD for row in rows) and not any(WORLD in key for key in expected):
        lines.append(
            f"{WORLD} is PyTorch's default group: torchpar.ledger(mesh=mesh) names it after its axis"
        )
    lines += [f"incomplete: {problem}" for problem in ledger.problems]
    if lines:
        raise UnexpectedCommunicationError("\n".join(lines))


def _of_which(single: int) -> str:
    return f", of which {single:,} are single numbers," if single else ""


def _times(total: int, size: float) -> str:
    """The ratio of observed to expected bytes, if it is a whole number: a message may be sent too often."""
    is_multiple = size and total > size and total % size == 0
    return f" ({total / size:.0f} times as many)" if is_multiple else ""


def _in_words(row: Communication) -> str:
    times = "once" if row.calls == 1 else f"{row.calls} times"
    of = f", for {row.purpose}" if row.purpose else ""
    where = f", from {row.source}" if row.source else ""
    return f"{row.kind} over {row.axis} {times}, {row.bytes:,} bytes{of}{where}"
