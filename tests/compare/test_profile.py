"""`shardpair profile`: figures, traces, pages and refusals; made by hand, and one for real."""

import json
import re
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from compare.cli import main
from compare.commands.profile import EngineProfile, Profile, profile_of, warn_of_watching
from compare.commands.profile.figures import chrome_trace, measured_figures
from compare.contract.timeline import TIMELINE, Lane, Span, Timeline
from compare.judge.outcome import Case, save, with_case
from compare.run.metrics import steady_times_ms
from compare.show.figures import svg
from compare.spec.experiment import edited
from tests.support.records import make_record, outcome_of

PAGE = "profile.html"


def span(kind, begin, end, **more):
    return Span(kind=kind, name=kind, begin_us=begin, duration_us=end - begin, **more)


def planted(step=3):
    """Two devices: 3 ms of communication each, of which 1 ms is exposed on the first and 3 on the second."""
    ours = [span("forward", 0, 4000), span("backward", 4000, 9000)]
    sent = {"operation": "all_reduce", "axis": "dp_replicate", "purpose": "gradients"}
    lanes = [
        Lane(
            device=0,
            spans=[*ours, *(span("communication", at, at + 2000, **sent) for at in (7000, 8000))],
        ),
        Lane(device=1, spans=[*ours, span("communication", 9000, 12000, **sent)]),
    ]
    return Timeline(step=step, wall_us=12500, lanes=lanes, method="by hand")


def profiled(folder, experiment, engine="torch-manual", timeline=None):
    """A record with a timeline, as a profiled run leaves it."""
    record = make_record(folder, experiment, engine=engine, ladder=False, tensors={})
    if timeline:
        (folder / TIMELINE).write_bytes(msgspec.json.encode(timeline))
    request = msgspec.structs.replace(record.request, profile=True)
    (folder / "request.json").write_bytes(msgspec.json.encode(request))
    return msgspec.structs.replace(record, request=request, timeline=timeline)


@pytest.fixture
def spread(tiny):
    return edited(tiny, {"layout": {"dp_replicate": 2}, "train": {"max_iters": 8}})


def test_planted_exposure_is_found(spread, tmp_path):
    record = profiled(tmp_path / "torch-manual", spread, timeline=planted())
    engine = profile_of("torch-manual", record)
    assert [device["exposed_ms"] for device in engine.devices] == [1, 3]
    assert [device["communication_ms"] for device in engine.devices] == [3, 3]
    assert [device["idle_ms"] for device in engine.devices] == [2.5, 0.5]
    assert engine.mean_ms("exposed") == 2
    # steps.jsonl has 10 + n ms; the first, the instrumented (1) and the watched one (3) do not count
    assert steady_times_ms(record) == [12, 14, 15, 16, 17]
    assert engine.step_ms == 15
    assert engine.watched_ms == 13
    parts = ("forward_ms", "backward_ms", "update_ms", "exposed_ms", "idle_ms")
    for device in engine.devices:  # of the timeline's wall, which is a row of its own
        assert sum(device[part] for part in parts) == engine.wall_ms == 12.5
    assert engine.bubble is engine.planned_bubble is None


@pytest.mark.usefixtures("with_pictures")
def test_timelines_share_scale_legend_and_method(spread, tmp_path):
    quick = msgspec.structs.replace(
        planted(), wall_us=900, lanes=[Lane(device=0, spans=[span("update", 0, 900)])]
    )
    records = {
        name: profiled(tmp_path / name, spread, timeline=timeline)
        for name, timeline in {"quick": quick, "slow": planted()}.items()
    }
    (figure,) = measured_figures(records)
    assert figure.caption.count("by hand") == 1
    text = svg(figure)
    shown = [text.index(word) for word in ("forward<", "backward<", "update<", "communication<")]
    assert shown == sorted(shown)
    assert text.index("quick: 0.9 ms") < text.index("slow: 12.5 ms")


def test_no_thread_of_a_trace_overlaps():
    events = json.loads(chrome_trace("torch-manual", planted(), process=2))["traceEvents"]
    assert {event["pid"] for event in events} == {2}
    compute = [event for event in events if event["ph"] == "X"]
    assert [event["cat"] for event in compute] == ["forward", "backward"] * 2
    for thread in (0, 1):
        own = [event for event in compute if event["tid"] == thread]
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(own))
    sent = {phase: {e["id"]: e for e in events if e["ph"] == phase} for phase in "be"}
    assert sent["b"].keys() == sent["e"].keys()
    lasted = [sent["e"][name]["ts"] - begun["ts"] for name, begun in sent["b"].items()]
    assert lasted == [2000, 2000, 3000]
    assert all(event["args"]["axis"] == "dp_replicate" for event in sent["b"].values())


def test_a_finished_profile_is_shown_again(spread, tmp_path, capsys):
    folder, outcome = tmp_path / "run", outcome_of(spread, study="profile", name="profile-test")
    timelines = {"torch-manual": planted(), "jax-manual": None}
    records = {name: profiled(folder / name, spread, name, one) for name, one in timelines.items()}
    against = {"torch-manual": "", "jax-manual": "torch-manual"}
    cases = {name: Case(request=one.request, against=against[name]) for name, one in records.items()}
    outcome = msgspec.structs.replace(outcome, cases=cases)
    for name, record in records.items():
        kept = Profile(experiment="check").keep(cases[name], record, first_step_after_s=1.0)
        outcome = with_case(outcome, name, kept, record, folder)
    save(outcome, folder)
    assert main(["report", str(folder)]) == 1  # one engine left no timeline
    said = capsys.readouterr().out
    assert "INCOMPLETE: jax-manual left no timeline; PASS: the losses of jax-manual agree" in said
    assert "torch-manual waits 2.0 of 12.5 ms for communication" in " ".join(said.split())
    assert "UNRELIABLE" not in said
    assert re.search(r"timeline's wall \(ms\) +12\.5 ", said)
    page = (folder / PAGE).read_text()
    assert "One step of each engine, measured" in page
    assert '<a href="torch-manual/trace.json">trace of torch-manual</a>' in page
    assert (folder / "torch-manual" / "trace.json").is_file()
    assert not (folder / "jax-manual" / "trace.json").exists()
    assert main(["report", str(folder), "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert [engine["name"] for engine in shown["values"]["engines"]] == list(records)
    made = msgspec.structs.replace(outcome.circumstances, cores=2, used_by_others={"torch-manual": 1.9})
    save(msgspec.structs.replace(outcome, circumstances=made), folder)
    assert main(["report", str(folder)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "Other processes used up to 1.9 of 2 cores while 1 of 1 cases ran" in said
    assert "its times are UNRELIABLE" in said
    assert "waits 2.0" not in said


def test_costly_watching_is_warned_of(spread, tmp_path):
    engine = profile_of("torch-manual", profiled(tmp_path / "torch-manual", spread, timeline=planted()))
    slow = msgspec.structs.replace(engine, watched_ms=1.26 * engine.step_ms)
    assert warn_of_watching([engine]) == []
    (warning,) = warn_of_watching([engine, slow])
    assert "of torch-manual by 26%" in warning


def test_two_engines_for_real(shardpair):
    flags = "--preset ddp --devices 2 --engines torch-manual torch-library --train.max_iters 6 --json"
    done = shardpair("profile", "check", *flags.split(), "--model.n_layer", "2", "--run_dir", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    engines = msgspec.convert(json.loads(done.stdout)["values"]["engines"], list[EngineProfile])
    assert [engine.name for engine in engines] == ["torch-manual", "torch-library"]
    for engine in engines:
        assert engine.step == 3
        assert len(engine.devices) == 2
        assert all(device["forward_ms"] > 0 and device["communication_ms"] > 0 for device in engine.devices)
        folder = shardpair.folder / "run"
        assert json.loads((folder / engine.name / "trace.json").read_text())["traceEvents"]
    assert Path(shardpair.folder, "run", PAGE).is_file()
