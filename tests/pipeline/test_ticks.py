"""Schedules in lock-step, carried out without a device: order, arrivals, slots and time."""

import itertools
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest

from compare.pipeline.schedules import Kind, Schedule, Task, make_schedule
from compare.pipeline.simulator import ScheduleError, peak_in_flight
from compare.pipeline.ticks import BACKWARD, FORWARD, IDLE, Ticks, lock_step

CASES = [
    *itertools.product(("gpipe", "1f1b"), range(1, 9), (1,)),
    *itertools.product(("interleaved",), range(1, 9), (2, 3)),
]
KINDS = {FORWARD: Kind.FORWARD, BACKWARD: Kind.BACKWARD}


@cache
def every() -> list[tuple[str, int, int, int, Schedule, Ticks]]:
    """Name, ranks, chunks, microbatches up to 16; the schedule, and it in lock-step."""
    found = []
    for (name, p, v), m in itertools.product(CASES, range(1, 17)):
        if name != "interleaved" or m % p == 0:
            schedule = make_schedule(name, ranks=p, microbatches=m, chunks=v)
            found.append((name, p, v, m, schedule, lock_step(schedule)))
    return found


def tasks_of(ticks: Ticks) -> Schedule:
    """Tasks of each rank, in order, read back from the table."""
    tasks = ticks.tasks
    return [
        [
            Task(KINDS[kind], int(tasks.stage[tick, rank]), int(tasks.microbatch[tick, rank]))
            for tick, kind in enumerate(tasks.kind[:, rank])
            if kind != IDLE
        ]
        for rank in range(ticks.ranks)
    ]


def test_every_rank_keeps_the_schedules_order():
    for _, p, v, m, schedule, ticks in every():
        assert tasks_of(ticks) == schedule
        assert (ticks.ranks, ticks.stages, ticks.microbatches) == (p, p * v, m)
        # v m forwards and v m backwards, and p - 1 ticks to fill the pipeline each way: none is wasted
        assert {len(array) for array in ticks.tasks} == {2 * (v * m + p - 1)}


def test_slots():
    """The first stage keeps no input; what else is in flight is kept, and for v = 1 never a message more."""
    for name, p, v, m, _, ticks in every():
        inputs = {
            "gpipe": m,
            "1f1b": min(m, p),  # in lock-step 2p - 1 would do
            "interleaved": min(v * m, 2 * (p - 1) + (v - 1) * p),
        }[name]
        if p > 1:
            assert ticks.input_slots == inputs
        else:
            assert ticks.input_slots <= (v - 1) * m
        if v == 1:
            assert ticks.gradient_slots == min(1, p - 1)  # it is used as soon as it comes
        else:
            assert ticks.gradient_slots <= p // 2 + 1


class Rank(NamedTuple):
    """A rank's slots: what lies where, the scratch slot last."""

    inputs: list
    gradients: list
    kept: list


def carry_out(ticks: Ticks) -> None:
    """A step with labels for numbers: a task must read the number that the neighbouring stage sent."""
    p, tasks, last = ticks.ranks, ticks.tasks, ticks.stages - 1
    slots = ticks.input_slots + 1, ticks.gradient_slots + 1, ticks.kept_slots
    ranks = [Rank(*([None] * count for count in slots)) for _ in range(p)]
    for tick in range(len(tasks.kind)):
        sent = [(None, None)] * p
        for rank, own in enumerate(ranks):
            stage, microbatch = tasks.stage[tick, rank], tasks.microbatch[tick, rank]
            x, g = own.inputs[tasks.input_slot[tick, rank]], own.gradients[tasks.gradient_slot[tick, rank]]
            if tasks.kind[tick, rank] == IDLE:
                continue
            if stage > 0 and (tasks.kind[tick, rank] == FORWARD or not ticks.kept_slots):
                assert x == (stage, microbatch)
            if ticks.kept_slots and tasks.kind[tick, rank] == FORWARD:
                own.kept[tasks.kept_slot[tick, rank]] = (stage, microbatch)
            elif ticks.kept_slots:
                assert own.kept[tasks.kept_slot[tick, rank]] == (stage, microbatch)
            if tasks.kind[tick, rank] == FORWARD:
                sent[rank] = ((stage + 1, microbatch), None)
            else:
                if stage < last:
                    assert g == (stage, microbatch)
                sent[rank] = (None, (stage - 1, microbatch))
        for rank, own in enumerate(ranks):
            activation, gradient = sent[(rank - 1) % p][0], sent[(rank + 1) % p][1]
            own.inputs[tasks.arriving_input[tick, rank]] = activation
            own.gradients[tasks.arriving_gradient[tick, rank]] = gradient
            own.inputs[-1] = own.gradients[-1] = None  # the scratch slot


def test_stages_find_their_messages():
    for *_, schedule, ticks in every():
        carry_out(ticks)
        # What a forward keeps is there for its backward and no longer.
        keeping = lock_step(schedule, keeps=True)
        carry_out(keeping)
        assert keeping.kept_slots == max(map(peak_in_flight, schedule))
        assert keeping.input_slots <= ticks.input_slots
        assert not ticks.kept_slots


def test_ticks_that_send():
    """GPipe sends activations at its first ticks, gradients at its last; the ends send nothing outwards."""
    for name, p, _, m, _, ticks in every():
        tasks, last = ticks.tasks, ticks.stages - 1
        activations = (tasks.kind == FORWARD) & (tasks.stage < last)
        gradients = (tasks.kind == BACKWARD) & (tasks.stage > 0)
        np.testing.assert_array_equal(ticks.sends_activations, activations.any(axis=1))
        np.testing.assert_array_equal(ticks.sends_gradients, gradients.any(axis=1))
        if name == "gpipe" and p > 1:
            assert ticks.sends_activations.sum() == ticks.sends_gradients.sum() == m + p - 2


def test_schedule_without_ticks_is_refused():
    with pytest.raises(ScheduleError, match="backward is one task"):
        lock_step(make_schedule("zero_bubble", ranks=2, microbatches=4))
    forwards, backwards = ([Task(kind, 0, 0), Task(kind, 0, 1)] for kind in (Kind.FORWARD, Kind.BACKWARD))
    with pytest.raises(ScheduleError, match="deadlock"):
        lock_step([backwards + forwards])
