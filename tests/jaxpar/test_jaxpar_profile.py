"""Profiles made by hand: whose event it was, when it was over, and as which span."""

from types import SimpleNamespace

import pytest

from jaxpar.measure.profile import GAP_US, Execution, make_timeline, read_events

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

%c (q: f32[8]) -> pred[] {
  %t = pred[] constant(true)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %before = f32[8]{0} negate(%p), metadata={op_name="jit(step)/neg"}
  %sum = f32[8]{0} all-reduce(%p), replica_groups={{0,1}}, to_apply=%add
  %back = f32[8]{0} negate(%p), metadata={op_name="jit(step)/transpose(jvp())/neg"}
  %after = f32[8]{0} negate(%p), metadata={op_name="jit(step)/mul"}
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


def test_events_belong_to_devices():
    found = read_events(
        profile(
            [ran("add.1", 1, 5, 6, number=7), ran("add.1", 0, 8, 9, number=8)],
            [mark("end: add.1", 20, 21, _c=7)],
            [ran("add.1", 0, 1, 99, number=9, module="jit_other")],
        ),
        hlo=HLO,
        devices=CPUS,
    )
    assert found == [Execution(1, "add.1", 5, 20), Execution(0, "add.1", 8, 9)]
    with pytest.raises(ValueError, match="not on each of 2 devices"):
        read_events(profile([ran("add.1", 1, 5, 6, number=7)]), hlo=HLO, devices=CPUS)


def test_gpu_planes_are_devices():
    gpus = [SimpleNamespace(platform="gpu", local_hardware_id=3)]
    event = mark("kernel", 1, 4, hlo_op="add.1", hlo_module="jit_step")
    planes = [
        *profile([event], plane="/device:GPU:3", line="Stream #14(Compute)").planes,
        *profile([event], plane="/device:GPU:3", line="XLA Ops").planes,
        *profile([event]).planes,
    ]
    found = read_events(SimpleNamespace(planes=planes), hlo=HLO, devices=gpus)
    assert found == [Execution(0, "add.1", 1, 4)]


def test_spans_merge_except_communication():
    events = [
        Execution(0, "before", 0, 1),
        Execution(0, "in_branch", 2, 7),
        Execution(0, "each", 3, 4),  # in a loop, and of XLA's making: it goes with what was before
        Execution(0, "sum", 8, 10),
        Execution(0, "each", 11, 12),
        Execution(0, "back", 12, 13),
        Execution(0, "back", 14 + GAP_US, 15 + GAP_US),
        Execution(0, "after", 30, 31),
    ]
    timeline = make_timeline(events, HLO, {"dp": 2}, 3)
    assert [(s.kind, s.begin_us, s.end_us) for s in timeline.lanes[0].spans] == [
        ("forward", 0, 7),
        ("communication", 8, 10),
        ("forward", 11, 12),
        ("backward", 12, 13),
        ("backward", 14 + GAP_US, 15 + GAP_US),
        ("update", 30, 31),
    ]
    assert (timeline.step, timeline.wall_us) == (3, 31)
