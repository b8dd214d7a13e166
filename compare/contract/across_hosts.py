"""Bytes of a collective that cross hosts: who of its group sits where, and what each sends to another host.

A ring visits a host's devices one after the other, then the next host's: however many devices a group has on
a host, one of them sends to another host. An all-to-all sends each device its own piece. Bytes are those of
all devices together, so that rows add up.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from compare.contract.communication import ring_wire_bytes


def sent_across(kind: str, full_bytes: int, group: Sequence[int], sender: int, hosts: Sequence[int]) -> float:
    """Bytes that one device of a collective's group sends to other hosts.

    Args:
        kind: all_reduce, all_gather, permute, ...
        full_bytes: of the gathered tensor; of an all-to-all and a permute, the sender's own.
        group: devices that speak with each other; of a permute, sender and receiver.
        sender: one of them.
        hosts: number of the host of every device.
    """
    elsewhere = sum(hosts[device] != hosts[sender] for device in group)
    if not elsewhere:
        return 0
    if kind == "all_to_all":
        return full_bytes * elsewhere / len(group)
    if kind == "permute":
        return full_bytes
    ring = sorted(group, key=lambda device: (hosts[device], device))
    place = ring.index(sender)
    if kind == "broadcast" and place == len(ring) - 1:  # handed on along a line, which ends here
        return 0
    receiver = ring[(place + 1) % len(ring)]
    return ring_wire_bytes(kind, full_bytes, len(ring)) if hosts[receiver] != hosts[sender] else 0


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


def numbered(hosts: Sequence[str]) -> list[int]:
    """The number of each device's host, in the order in which they first come."""
    order = list(dict.fromkeys(hosts))
    return [order.index(host) for host in hosts]
