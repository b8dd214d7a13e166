"""Pipeline schedules without a network: order, progress, memory and time, for p in 1..8 and m in 1..16."""

import itertools
import json

import pytest

from compare.cli import main
from compare.contract.experiment import ExperimentError
from compare.contract.schedule_simulator import (
    ScheduleError,
    bubble_fraction,
    check_complete,
    makespan,
    peak_in_flight,
    prerequisites,
    run,
    with_communication,
)
from compare.contract.schedules import Kind, Task, make_schedule

SIZES = list(itertools.product(range(1, 9), range(1, 17)))
CASES = [
    *((name, p, m, 1) for name in ("gpipe", "1f1b", "zero_bubble") for p, m in SIZES),
    *(("interleaved", p, m, v) for p, m in SIZES if m % p == 0 for v in (1, 2, 3)),
]


@pytest.fixture(params=CASES, ids=lambda case: "-".join(map(str, case)))
def case(request):
    name, p, m, v = request.param
    return name, p, m, v, make_schedule(name, ranks=p, microbatches=m, chunks=v)


def test_every_task_is_done_once_after_what_it_needs(case):
    _, p, _, v, schedule = case
    assert check_complete(schedule) == p * v
    slots = run(schedule)
    ended = {slot.task: slot.end for slot in slots}
    assert len(ended) == len(slots) == sum(map(len, schedule))
    for slot in slots:
        assert all(ended[need] <= slot.start for need in prerequisites(slot.task, p * v))
    for rank in range(p):
        own = [slot for slot in slots if slot.rank == rank]
        assert all(before.end <= after.start for before, after in itertools.pairwise(own))


def test_makespan_is_the_closed_form(case):
    name, p, m, v, schedule = case
    expected = {
        "gpipe": 3 * (m + p - 1),
        "1f1b": 3 * (m + p - 1),
        "interleaved": 3 * m + 3 * (p - 1) / v,
        "zero_bubble": max(3 * m + p - 1, 2 * (p + m) - 1),  # the second only where m < p
    }[name]
    assert makespan(schedule) == pytest.approx(expected)
    assert bubble_fraction(schedule) == pytest.approx(1 - 3 * m / expected)


def test_activations_held_are_the_closed_form(case):
    name, p, m, v, schedule = case
    held = [peak_in_flight(own) for own in schedule]
    if name == "gpipe":
        assert held == [m] * p
    elif name == "1f1b" or (v == 1 and name == "interleaved"):
        assert held == [min(m, p - rank) for rank in range(p)]
    elif name == "zero_bubble":
        assert held == [min(m, p)] * p
    else:  # interleaved: its warm-up, and one more
        assert held == [min(v * m, 2 * (p - rank - 1) + (v - 1) * p + 1) for rank in range(p)]


def test_messages_pair_up_in_order(case):
    """What one rank sends to another, in order, is what the other receives: a plain channel is enough."""
    _, p, _, _, schedule = case
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
            assert sent == received


def test_a_deadlock_is_found():
    schedule = make_schedule("1f1b", ranks=2, microbatches=2)
    schedule[0][0], schedule[0][-1] = schedule[0][-1], schedule[0][0]  # backward before its forward
    with pytest.raises(ScheduleError, match="deadlock: rank 0 at"):
        run(schedule)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda schedule: schedule[1].pop(), "is done 0 times, not 1"),
        (lambda schedule: schedule[1].append(schedule[1][0]), "is done 2 times, not 1"),
        (lambda schedule: schedule[0].append(Task(Kind.FORWARD, 1, 0)), "belongs to rank 1"),
        (lambda schedule: schedule[0].append(Task(Kind.BACKWARD_WEIGHT, 0, 0)), "is done 1 times, not 0"),
    ],
)
def test_an_incomplete_schedule_is_refused(damage, says):
    schedule = make_schedule("gpipe", ranks=2, microbatches=2)
    damage(schedule)
    with pytest.raises(ScheduleError, match=says):
        check_complete(schedule)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"name": "nosuch", "ranks": 2, "microbatches": 2}, "no such schedule"),
        (
            {"name": "interleaved", "ranks": 4, "microbatches": 6, "chunks": 2},
            "= 6 are not divisible by stages = 4",
        ),
        ({"name": "1f1b", "ranks": 2, "microbatches": 2, "chunks": 2}, "use interleaved"),
        ({"name": "gpipe", "ranks": 0, "microbatches": 2}, "stages = 0 must be at least 1"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(arguments, says):
    with pytest.raises(ExperimentError, match=says):
        make_schedule(**arguments)


def test_picture_and_trace(tmp_path, capsys):
    picture, trace = tmp_path / "schedules.png", tmp_path / "trace.json"
    assert main(["schedule", "--picture", str(picture), "--trace", str(trace)]) == 0
    assert "zero_bubble" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    events = json.loads(trace.read_text())["traceEvents"]
    assert len([event for event in events if event["ph"] == "X"]) == 4 * 8 * (2 + 2 + 2 * 2 + 3)
