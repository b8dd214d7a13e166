"""Pipeline schedules without a network: order, progress, memory and time, for p in 1..8 and m in 1..16."""

import itertools
from collections import deque
from functools import cache

import pytest

from compare.pipeline.rendezvous import in_one_order, is_receive, maker
from compare.pipeline.schedules import Kind, Schedule, Task, make_schedule
from compare.pipeline.simulator import (
    Action,
    ScheduleError,
    bubble_fraction,
    check_complete,
    makespan,
    peak_in_flight,
    prerequisites,
    run,
    with_communication,
)

CASES = [
    *((name, p, 1) for name in ("gpipe", "1f1b", "zero_bubble") for p in range(1, 9)),
    *(("interleaved", p, v) for p in range(1, 9) for v in (1, 2, 3)),
]


@cache
def every() -> list[tuple[str, int, int, int, Schedule]]:
    """Name, ranks, chunks, microbatches up to 16: interleaved where the ranks divide them."""
    return [
        (name, p, v, m, make_schedule(name, ranks=p, microbatches=m, chunks=v))
        for name, p, v in CASES
        for m in range(1, 17)
        if name != "interleaved" or m % p == 0
    ]


def test_tasks_follow_their_prerequisites():
    assert len(every()) == 3 * 8 * 16 + 3 * sum(16 // p for p in range(1, 9))
    for *case, p, v, _, schedule in every():
        assert check_complete(schedule) == p * v, case
        slots = run(schedule)
        ended = {slot.task: slot.end for slot in slots}
        assert len(ended) == len(slots) == sum(map(len, schedule)), (case, p, v)
        for slot in slots:
            needs = prerequisites(slot.task, p * v)
            assert all(ended[need] <= slot.start for need in needs), (case, p, v, slot)
        for rank in range(p):
            own = [slot for slot in slots if slot.rank == rank]
            pairs = itertools.pairwise(own)
            assert all(before.end <= after.start for before, after in pairs), (case, p, v, rank)


def test_makespan_is_the_closed_form():
    for name, p, v, m, schedule in every():
        expected = {
            "gpipe": 3 * (m + p - 1),
            "1f1b": 3 * (m + p - 1),
            "interleaved": 3 * m + 3 * (p - 1) / v,
            "zero_bubble": max(3 * m + p - 1, 2 * (p + m) - 1),  # the second only where m < p
        }[name]
        assert makespan(schedule) == pytest.approx(expected), (name, p, v, m)
        assert bubble_fraction(schedule) == pytest.approx(1 - 3 * m / expected), (name, p, v, m)


def test_activations_in_flight():
    for name, p, v, m, schedule in every():
        held = [peak_in_flight(own) for own in schedule]
        if name == "gpipe":
            assert held == [m] * p, (name, p, v, m)
        elif name == "1f1b" or (v == 1 and name == "interleaved"):
            assert held == [min(m, p - rank) for rank in range(p)], (name, p, v, m)
        elif name == "zero_bubble":
            assert held == [min(m, p)] * p, (name, p, v, m)
        else:  # interleaved: its warm-up, and one more
            most = [min(v * m, 2 * (p - rank - 1) + (v - 1) * p + 1) for rank in range(p)]
            assert held == most, (name, p, v, m)


def test_messages_pair_up_in_order():
    """One rank sends to another, in order, what the other receives: a plain channel is enough."""
    for name, p, v, m, schedule in every():
        actions = with_communication(schedule)
        for sender, receiver in itertools.product(range(p), repeat=2):
            for what, step in (("activation", 1), ("gradient", -1)):
                sent = [
                    (task.stage + step, task.microbatch)
                    for kind, task, peer in actions[sender]
                    if kind == f"send_{what}" and peer == receiver
                ]
                received = [
                    (task.stage, task.microbatch)
                    for kind, task, peer in actions[receiver]
                    if kind == f"receive_{what}" and peer == sender
                ]
                assert sent == received, (name, p, v, m, sender, receiver, what)


def check_rendezvous(actions: list[list[Action]]) -> None:
    """Carry actions out as strictly as any network may: messages one by one, each when both ends are there.

    A computation waits for what it needs, a message does not hold it up.
    """
    stages = 1 + max(action.task.stage for own in actions for action in own)
    position = [0] * len(actions)
    posted: list[deque[Action]] = [deque() for _ in actions]
    done: list[set[Task]] = [set() for _ in actions]  # by rank, the tasks whose results it has
    while any(posted) or any(place < len(own) for place, own in zip(position, actions, strict=True)):
        progressed = False
        for rank, own in enumerate(actions):
            while position[rank] < len(own):
                action = own[position[rank]]
                if action.what != "compute":
                    posted[rank].append(action)
                elif done[rank].issuperset(prerequisites(action.task, stages)):
                    done[rank].add(action.task)
                else:
                    break
                position[rank] += 1
                progressed = True
            if posted[rank] and (other := posted[posted[rank][0].peer]) and _meet(posted[rank][0], other[0]):
                for end in (rank, posted[rank][0].peer):
                    done[end].add(maker(posted[end].popleft()))
                progressed = True
        if not progressed:
            heads = [(rank, own[0]) for rank, own in enumerate(posted) if own]
            stuck = "; ".join(f"rank {rank} in {head.what} of {head.task}" for rank, head in heads)
            raise ScheduleError(f"deadlock of messages: {stuck}")


def _meet(action: Action, other: Action) -> bool:
    """Whether two ranks' actions are the two ends of one message."""
    return is_receive(action) != is_receive(other) and maker(action) == maker(other)


def test_messages_of_all_ranks_are_in_one_order():
    """A network without tags, where each rank's messages go one by one and a send waits for its receive."""
    for *_, schedule in every():
        actions = in_one_order(schedule)
        check_rendezvous(actions)
        for own, spelled_out in zip(actions, with_communication(schedule), strict=True):
            assert sorted(own) == sorted(spelled_out)
            computed = [action for action in own if action.what == "compute"]
            assert computed == [action for action in spelled_out if action.what == "compute"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda schedule: schedule[1].pop(), "is done 0 times, not 1"),
        (lambda schedule: schedule[1].append(schedule[1][0]), "is done 2 times, not 1"),
        (lambda schedule: schedule[0].append(Task(Kind.FORWARD, 1, 0)), "belongs to rank 1"),
        (lambda schedule: schedule[0].append(Task(Kind.BACKWARD_WEIGHT, 0, 0)), "is done 1 times, not 0"),
    ],
    ids=["missing", "doubled", "other_rank", "surplus"],
)
def test_incomplete_schedule_is_refused(damage, words):
    schedule = make_schedule("gpipe", ranks=2, microbatches=2)
    damage(schedule)
    with pytest.raises(ScheduleError, match=words):
        check_complete(schedule)


def test_deadlock_is_refused():
    schedule = make_schedule("1f1b", ranks=2, microbatches=2)
    schedule[0][0], schedule[0][-1] = schedule[0][-1], schedule[0][0]  # backward before its forward
    with pytest.raises(ScheduleError, match="deadlock: rank 0 at"):
        run(schedule)
