"""Names of the hosts on which the processes of a run are."""

from collections import Counter
from collections.abc import Iterable


def host_names(places: Iterable[tuple[str, int]]) -> list[str]:
    """The host of each process, by its name; the hosts of a test, which are one machine, are numbered.

    Args:
        places: of each process, in order, the machine's name and the process's number on its host. Two with
            the same number are on two hosts, though the machine be one: `box`, `box (2)`.
    """
    seen: Counter[tuple[str, int]] = Counter()
    names = []
    for name, local in places:
        seen[name, local] += 1
        copy = seen[name, local]
        names.append(name if copy == 1 else f"{name} ({copy})")
    return names
