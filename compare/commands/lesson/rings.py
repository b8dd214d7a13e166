"""Collectives on a ring, hop by hop: carried out on sets of devices, and drawn.

Every device sends to the next one only, one piece a hop. The pictures show what these functions did; the
bytes in the captions are the pieces that they sent.

Source: Thakur et al., "Optimization of collective communication operations in MPICH".
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from compare.show.figures import WHOLE, WIDE, Axes, Figure, colour, strip_axes, tile

MOST_DEVICES = 4
"""Most devices of a picture: the boxes of more are too small."""
Piece = frozenset[int]
"""The devices whose numbers a piece is the sum of; empty for a piece that is not there."""
State = list[list[Piece]]
"""Pieces of the tensor, by device."""
NOTHING: Piece = frozenset()


class Ring(NamedTuple):
    """A collective that was carried out."""

    states: list[State]
    """At the start and after each hop."""
    sent: int
    """Pieces that a device sent; of devices that send unequally, the most."""


def reduce_scatter(n: int) -> Ring:
    """Each device has all of its own tensor; in the end each has one piece of the sum, (n - 1) hops later."""
    return _hops([[frozenset({d})] * n for d in range(n)], lambda d, hop: (d - hop - 1) % n, keeps=False)


def all_gather(n: int) -> Ring:
    """Each device has one piece; in the end all have all of them, (n - 1) hops later."""
    start = [[frozenset({d}) if piece == d else NOTHING for piece in range(n)] for d in range(n)]
    return _hops(start, lambda d, hop: (d - hop) % n, keeps=True)


def all_reduce(n: int) -> Ring:
    """A reduce-scatter, and an all-gather of its pieces: all have the whole sum, 2 (n - 1) hops later."""
    first = reduce_scatter(n)
    second = _hops(first.states[-1], lambda d, hop: (d - hop) % n, keeps=True)
    return Ring([*first.states, *second.states[1:]], first.sent + second.sent)


def all_to_all(n: int) -> Ring:
    """Each device has a piece for each; in the end it has what all had for it."""
    start = [[frozenset({d})] * n for d in range(n)]
    return Ring([start, [[frozenset({piece}) for piece in range(n)]] * n], n - 1)


def permute(n: int) -> Ring:
    """A send and a receive: each stage of a pipeline hands its tensor, one piece, to the next."""
    start = [[frozenset({d})] for d in range(n)]
    return Ring([start, [[frozenset({d - 1}) if d else NOTHING] for d in range(n)]], 1)


RINGS: dict[str, Callable[[int], Ring]] = {
    "all_reduce": all_reduce,
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
    "all_to_all": all_to_all,
    "permute": permute,
}
"""By the kind of a ledger's row."""
CAPTIONS = {
    "all_reduce": "Everybody needs the sum of all. Its pieces travel the ring twice: n - 1 hops add them, n "
    "- 1 hops distribute the sums. A device sends {sent} pieces of S / {n}, 2 (n - 1) / n of the tensor's S "
    "bytes.",
    "reduce_scatter": "Everybody needs one piece of the sum: the first half of an all-reduce. A device "
    "sends {sent} pieces of S / {n}.",
    "all_gather": "Everybody has a piece and needs them all: the second half of an all-reduce. A device "
    "sends {sent} pieces of S / {n}.",
    "all_to_all": "Everybody has a piece for everybody, positions of its heads or tokens of its experts, "
    "and sends it straight there. A device sends {sent} pieces of S / {n}. Nothing is added up.",
    "permute": "A stage hands its tensor of S bytes to the next one, and backward its gradient to the one "
    "before; in a ring of context parallelism the last one to the first, too. Nothing is added up.",
}


def figure(kind: str, purposes: Sequence[str], devices: int) -> Figure:
    """A collective, hop by hop: a row for each device, a box for each piece, stripes for whose numbers.

    It is drawn for the `devices` of the collective's group, or for `MOST_DEVICES`.
    """
    n = min(devices, MOST_DEVICES)
    ring, run_has = RINGS[kind](n), f" The run has {devices} devices in a group." if devices > n else ""
    step = max(len(ring.states[0][0]), 2) + 1.5

    def draw(axes: Axes) -> None:
        for hop, state in enumerate(ring.states):
            axes.text(hop * step, -0.2, f"hop {hop}" if hop else "start", va="bottom")
            for device, pieces in enumerate(state):
                for number, piece in enumerate(pieces):
                    stripes = [
                        (WHOLE, (stripe / len(piece), (stripe + 1) / len(piece)), colour(whose))
                        for stripe, whose in enumerate(sorted(piece))
                    ]
                    tile(axes, hop * step + number, device, 1, 1, stripes)
        axes.set(xlim=(-0.1, len(ring.states) * step - 1.4), ylim=(n + 0.1, -0.1), aspect="equal")
        strip_axes(axes, {device + 0.5: f"device {device}" for device in range(n)})

    words = CAPTIONS[kind].format(n=n, sent=ring.sent)
    return Figure(
        title=f"{kind} on {n} devices, hop by hop",
        caption=f"{words} A box of several colours is the sum of these devices' numbers. Here it carries "
        f"{', '.join(purposes)}.{run_has}",
        draw=draw,
        width=WIDE,
        height=0.3 + 0.25 * n,
    )


def _hops(start: State, sends: Callable[[int, int], int], *, keeps: bool) -> Ring:
    """Hops until each piece has been everywhere: device d sends its piece `sends(d, hop)` to the next one.

    With `keeps` a piece stays with its sender, too, and replaces the receiver's; else it is added to it.
    """
    states, n = [start], len(start)
    for hop in range(n - 1):
        before, after = states[-1], [list(pieces) for pieces in states[-1]]
        for device in range(n):
            piece, receiver = sends(device, hop), (device + 1) % n
            after[receiver][piece] = before[device][piece] | (NOTHING if keeps else after[receiver][piece])
            if not keeps:
                after[device][piece] = NOTHING
        states.append(after)
    return Ring(states, n - 1)
