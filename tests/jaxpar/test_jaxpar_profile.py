"""Profiles made by hand: whose event it was, when it was over, in which turn of a loop, and as which span."""

from types import SimpleNamespace

import pytest

from compare.contract.timeline import Span
from jaxpar.measure.merging import LIMIT, SMALLEST_GAP_US, merged
from jaxpar.measure.nesting import Turns, places
from jaxpar.measure.profile_events import Execution, UnreadableProfileError, read_events

HLO = """HloModule jit_step, num_partitions=2

%left (q: f32[8]) -> f32[8] {
  %in_branch = f32[8]{0} negate(%q), metadata={op_name="jit(step)/jvp()/neg"}
}

%right (q: f32[8]) -> f32[8] {
  %inner = f32[8]{0} while(%q), condition=%c, body=%left, backend_config={"known_trip_count":{"n":"5"}}
}

%body (q: f32[8]) -> f32[8] {
  %each = f32[8]{0} add(%q, %q)
  %choice = f32[8]{0} conditional(%p, %q, %q), branch_computations={%left, %right}
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %before = f32[8]{0} negate(%p)
  %loop = f32[8]{0} while(%p), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"3"}}
}
"""
CPUS = [SimpleNamespace(platform="cpu", local_hardware_id=number) for number in (0, 1)]


def mark(name: str, begin_us: float, end_us: float, **stats: object) -> SimpleNamespace:
    begin, end = begin_us * 1e3, end_us * 1e3
    return SimpleNamespace(
        name=name, start_ns=begin, end_ns=end, duration_ns=end - begin, stats=list(stats.items())
    )


def ran(name: str, device: int, begin_us: float, end_us: float, *, number: int, module: str = "jit_step"):
    stats = {"hlo_op": name, "hlo_module": module, "device_ordinal": device, "_p": number}
    return mark(name, begin_us, end_us, **stats)


def profile(*threads: list[SimpleNamespace], plane: str = "/host:CPU", line: str = "tf_XLAEigen/1"):
    lines = [SimpleNamespace(name=line, events=events) for events in threads]
    return SimpleNamespace(planes=[SimpleNamespace(name=plane, lines=lines)])


def test_an_instruction_is_its_device_s_whatever_thread_begins_or_ends_it():
    found = read_events(
        profile(
            [ran("add.1", 1, 5, 6, number=7), ran("add.1", 0, 8, 9, number=8)],
            [mark("end: add.1", 20, 21, _c=7), mark("Wait: pending_threads=1/2", 2, 5)],
            [ran("add.1", 0, 1, 99, number=9, module="jit_other")],
        ),
        hlo=HLO,
        devices=CPUS,
    )
    assert found.events == [Execution(1, "add.1", 5, 20), Execution(0, "add.1", 8, 9)]
    assert found.waited_us == 3


def test_a_profile_in_which_a_device_is_missing_is_an_error():
    with pytest.raises(UnreadableProfileError, match="not on each of 2 devices"):
        read_events(profile([ran("add.1", 1, 5, 6, number=7)]), hlo=HLO, devices=CPUS)


def test_on_a_gpu_a_plane_is_a_device_and_its_streams_are_read_once():
    gpus = [SimpleNamespace(platform="gpu", local_hardware_id=3)]
    event = mark("kernel", 1, 4, hlo_op="add.1", hlo_module="jit_step")
    planes = [
        *profile([event], plane="/device:GPU:3", line="Stream #14(Compute)").planes,
        *profile([event], plane="/device:GPU:3", line="XLA Ops").planes,
        *profile([event]).planes,
    ]
    found = read_events(SimpleNamespace(planes=planes), hlo=HLO, devices=gpus)
    assert found.events == [Execution(0, "add.1", 1, 4)]


def test_the_turn_of_a_loop_follows_from_what_stands_in_its_body():
    found = places(HLO)
    assert set(found) == {"before", "loop", "each", "choice", "in_branch", "inner"}
    assert (found["each"].trips, found["each"].marker) == (3, "each")
    assert (found["in_branch"].loop, found["in_branch"].marker) == ("loop", "choice")
    assert found["in_branch"].op_name == "jit(step)/jvp()/neg"
    assert found["before"].loop == ""

    events = [Execution(0, "before", 0, 1)]
    for turn in range(3):
        begin = 10.0 * (turn + 1)
        events += [Execution(0, "each", begin, begin + 1), Execution(0, "choice", begin + 1, begin + 9)]
    nested = [
        Execution(0, "in_branch", begin, begin + 0.5) for begin in (12, 13, 14, 33)
    ]  # an inner loop, too
    turns = Turns(events + nested, found)
    assert [turns.of(event) for event in nested] == [0, 0, 0, 2]
    assert [turns.of(event) for event in events if event.name == "each"] == [0, 1, 2]
    assert turns.of(events[0]) == -1


def test_a_loop_that_did_not_turn_as_often_as_xla_says_tells_nothing():
    events = [Execution(0, "each", 10, 11), Execution(0, "each", 20, 21)]
    turns = Turns(events, places(HLO))
    assert [turns.of(event) for event in events] == [-1, -1]


def span(begin_us: float, duration_us: float = 1, kind="forward", microbatch: int = -1) -> Span:
    return Span(kind=kind, name=kind, begin_us=begin_us, duration_us=duration_us, microbatch=microbatch)


def test_work_that_goes_on_is_one_span_and_communication_parts_it():
    lane = [
        span(0),
        span(2, 5),
        span(3),  # on another thread
        span(8, microbatch=1),
        span(10, kind="communication"),
        span(11, microbatch=1),
        span(12, kind="backward"),
        span(13 + SMALLEST_GAP_US + 1, kind="backward"),
    ]
    (found,), gap = merged([lane])
    assert gap == SMALLEST_GAP_US
    assert [(s.kind, s.begin_us, s.end_us) for s in found] == [
        ("forward", 0, 7),
        ("forward", 8, 9),
        ("communication", 10, 11),
        ("forward", 11, 12),
        ("backward", 12, 13),
        ("backward", 24, 25),
    ]


def test_gaps_are_closed_until_a_picture_can_show_the_lane():
    lane = [span(30.0 * number) for number in range(2 * LIMIT)]
    (found,), gap = merged([lane])
    assert gap == 4 * SMALLEST_GAP_US
    assert (len(found), found[0].end_us) == (1, lane[-1].end_us)
