"""`shardpair buckets`: its cases, overheads round by round, the prediction, and how it is shown."""

import json
from pathlib import Path

import msgspec
import pytest
from benches import HERE, TIMING, measurement_of
from records import outcome_of

from compare.cli import main
from compare.contract.collective_bench import make_row
from compare.execute.launch import EngineError
from compare.judge.closed_forms.buckets import bucket_sizes
from compare.judge.collective_fit import Fit, fits_of
from compare.judge.outcome import Outcome, save
from compare.judge.timed_outcome import timed
from compare.numerics.parameters import parameter_count, storage_dtype
from compare.show.figures import save_figures
from compare.show.page import write_page
from compare.spec.experiment import Experiment, ExperimentError, edited, load
from compare.studies import buckets as study
from compare.studies.buckets import ALONE, Buckets, best_of, default_bucket_mb, line_of, overheads_of
from compare.studies.collective_runs import CollectiveBench

FIT = Fit(implementation="ours", kind="all_reduce", ranks=2, latency_us=100.0, bandwidth_gb_s=0.5, misfit=0.1)
ENDLESS = msgspec.structs.replace(FIT, latency_us=0.0, bandwidth_gb_s=msgspec.UNSET)
ALONE_MS = 10.0


def asked(experiment: Experiment, **given) -> Buckets:
    """The command, as its command line would give it for this experiment."""
    fields = {"bucket_mb": (0.001, 0.02), "window": TIMING.window, "windows": TIMING.windows, "anyway": True}
    sections = {name: getattr(experiment, name) for name in Experiment.__struct_fields__}
    return Buckets(**sections, **{**fields, **given})


def planned(experiment: Experiment, **given) -> Outcome:
    return asked(experiment, **given).planned()


def done(experiment: Experiment) -> Outcome:
    """Five rounds, each slower than the last: case i costs i ms beyond the one without communication."""
    plan = planned(experiment)
    *cases, alone = plan.cases.values()
    kept = {
        case.name: {
            number: msgspec.to_builtins(measurement_of(case, number, wall_ms=ALONE_MS + number + extra))
            for number in range(1, 6)
        }
        for extra, case in enumerate([alone, *cases])
    }
    circumstances = msgspec.structs.replace(HERE, busy_cores=[0.0] * 5)
    return msgspec.structs.replace(plan, kept=kept, circumstances=circumstances)


def points_of(outcome: Outcome, fit: Fit = FIT):
    view = timed(outcome)
    return overheads_of(view, line_of(view.cases[0].experiment, fit))


def test_cases_share_a_block_and_differ_only_in_how_gradients_are_reduced(tiny):
    *others, alone = planned(tiny).cases.values()
    assert alone.variant == ALONE
    assert alone.experiment.layout.devices == 1
    assert alone.experiment.train.batch_size == tiny.train.batch_size // 2
    assert [case.variant for case in others] == ["flat", "naive", "overlapped", "0.001 MB", "0.02 MB"]
    assert len({case.block for case in (alone, *others)}) == 1
    same = {
        edited(case.experiment, {"layout": {"gradient_sync": "flat", "bucket_mb": 25.0}}) for case in others
    }
    assert len(same) == 1
    assert next(iter(same)).train.max_iters == asked(tiny).timing.steps
    assert next(iter(same)).layout.dp_replicate == 2


def test_default_sizes_are_round_and_worth_timing():
    for name in ("check", "demo", "cpu", "baby-gpt", "gpt2-124m"):
        experiment = load(name)
        size = parameter_count(experiment.model) * storage_dtype(experiment).itemsize
        sizes = default_bucket_mb(experiment)
        assert all(size / 50 <= mb * 1e6 <= size / 2 for mb in sizes), name
        assert 3 <= len(sizes) <= 6, name
        assert list(sizes) == sorted(set(sizes))
        made = {
            tuple(bucket_sizes(experiment.model, limit=mb * 1e6, itemsize=storage_dtype(experiment).itemsize))
            for mb in sizes
        }
        assert len(made) == len(sizes), name
    assert {10.0, 25.0, 100.0} <= set(default_bucket_mb(load("gpt2-124m")))
    least = edited(load("check"), {"model": {"n_layer": 1, "n_embd": 4, "vocab_size": 2, "block_size": 2}})
    assert len(default_bucket_mb(least)) == 1  # hardly more bytes than the least bucket


def test_overheads_are_taken_within_rounds(tiny):
    result = done(tiny)
    alone_ms, points = points_of(result)
    assert [point.overhead_ms.median for point in points] == pytest.approx([1, 2, 3, 4, 5])
    assert all(point.overhead_ms.low == pytest.approx(point.overhead_ms.median) for point in points)
    assert alone_ms == pytest.approx(ALONE_MS + 3)
    flat, naive, overlapped, small, large = points
    assert flat.buckets == 1
    assert (
        naive.buckets == overlapped.buckets == 2 * 12 + 4
    )  # parameters: 12 a block, 2 embeddings, last norm
    assert 1 < large.buckets < small.buckets <= naive.buckets
    assert best_of(points) is small  # though flat has the least overhead, it has no bucket to choose


def test_the_prediction_is_the_closed_form_s(tiny):
    line = line_of(tiny, msgspec.structs.replace(FIT, latency_us=10.0))
    size = parameter_count(tiny.model) * 8
    assert line.gradient_bytes == size
    assert line.best_bucket_mb == pytest.approx((size * 0.5e9 * 10e-6) ** 0.5 / 1e6)
    assert line.best_buckets * line.best_bucket_mb * 1e6 == pytest.approx(size)
    assert line_of(tiny, ENDLESS).best_bucket_mb == 0.0


def test_a_case_that_failed_is_no_point(tiny):
    result = done(tiny)
    lost = next(iter(result.cases))
    kept = {name: rounds for name, rounds in result.kept.items() if name != lost}
    _, points = points_of(msgspec.structs.replace(result, kept=kept))
    assert [point.name for point in points] == ["naive", "overlapped", "0.001 MB", "0.02 MB"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"devices": 1}, "nothing to reduce on fewer than 2"),
        ({"devices": 3}, "not divisible by --devices 3"),
        ({"bucket_mb": (1.0, 1.0)}, "give each once"),
        ({"bucket_mb": (0.0,)}, "bucket_mb"),
        ({"rounds": 0}, "--rounds, --window"),
    ],
)
def test_what_cannot_work_is_refused(tiny, given, message):
    with pytest.raises(ExperimentError, match=message):
        planned(tiny, **given)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--layout.dp_replicate", "4"],
        ["--layout.bucket_mb", "3"],
        ["--train.max_iters", "7"],
        ["--init_from", "a"],
    ],
)
def test_what_has_no_effect_is_refused(arguments, capsys):
    assert main(["buckets", "demo", *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err


def ready(monkeypatch, outcome: Outcome, folder: Path) -> None:
    """A finished study, and its fit, in a folder."""
    save(outcome, folder)
    monkeypatch.setattr(study, "kept_fit", lambda folder: FIT)


def test_the_study_is_printed_and_drawn(tiny, tmp_path, monkeypatch, capsys):
    ready(monkeypatch, done(tiny), tmp_path)
    assert main(["report", str(tmp_path), "--picture", str(tmp_path / "a.png")]) == 0
    printed = capsys.readouterr().out
    assert "o = 100 us, w = 0.50 GB/s" in printed
    assert "measured best 0.001 MB: 4.0 ms [4.0, 4.0] beyond 13.0 ms without communication" in printed
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "buckets.html").read_text().count("<svg") == 1
    assert main(["report", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rows"][0]["name"] == "flat"
    assert told["prediction"]["gradient_bytes"] == parameter_count(tiny.model) * 8


def test_a_failure_is_in_the_exit_code_and_on_the_page(tiny, tmp_path, monkeypatch, capsys):
    outcome = done(tiny)
    failures = {next(iter(outcome.cases)): "rank 1 was killed"}
    ready(monkeypatch, msgspec.structs.replace(outcome, failures=failures), tmp_path)
    assert main(["report", str(tmp_path)]) == 1
    assert "rank 1 was killed" in capsys.readouterr().out
    assert "rank 1 was killed" in (tmp_path / "buckets.html").read_text()


def test_ctrl_c_says_how_to_go_on(timed_engines, tiny, tmp_path, capsys):
    arguments = ["--rounds", "3", "--run_dir", "b", "--bucket_mb", "0.001", "0.02", "--quiet"]
    tiny_of_two = ["tiny.toml", "--train.batch_size", "4"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Buckets, "after", lambda self, outcome, folder: outcome)
        patch.setattr(study, "kept_fit", lambda folder: FIT)
        timed_engines.interrupted_at = 7  # the second round's first
        assert main(["buckets", *tiny_of_two, *arguments]) == 130
        said = " ".join(capsys.readouterr().err.split())
        assert "Kept: 1 of 3 rounds" in said
        assert "shardpair buckets --continue b" in said
        timed_engines.interrupted_at = 0
        assert main(["bench", "--continue", "b"]) == 2
        assert "`shardpair buckets` goes on" in capsys.readouterr().err
        assert main(["buckets", "--continue", "b", "--bucket_mb", "1"]) == 2
        assert "leave out --bucket_mb" in capsys.readouterr().err
        assert main(["buckets", "--continue", "b", "--quiet"]) == 0
        assert "measured best" in capsys.readouterr().out
    assert len(timed_engines.launched) == 7 + 12


def test_a_plan_starts_nothing(capsys):
    assert main(["buckets", "demo", "--dry_run"]) == 0
    assert "naive" in capsys.readouterr().out


def test_the_all_reduce_is_timed_once_a_study_unless_it_went_wrong(tiny, tmp_path, monkeypatch):
    result = planned(edited(tiny, {"model": {"n_layer": 4, "n_embd": 512}}))  # 100 MB of gradients
    wanted = []

    def run_requests(requests, left_out, *, run_dir, **_):
        (request,) = requests.values()
        wanted.append(request)
        seconds = {case: 1e-4 + case.size / 1e9 for case in request.cases}
        rows = [
            make_row("ours", case, ranks=2, seconds=time, iterations=5, wrong=int(len(wanted) == 1))
            for case, time in seconds.items()
        ]
        bench = CollectiveBench(requests={"torchpar-2": request}, rows=rows, fits=fits_of(rows))
        Path(run_dir).mkdir()
        more = {"bench": msgspec.to_builtins(bench)}
        save(outcome_of(tiny, study="collectives", more=more), Path(run_dir))

    monkeypatch.setattr(study, "run_requests", run_requests)
    monkeypatch.setattr(study, "busy_cores", lambda: 0.0)
    with pytest.raises(EngineError, match="wrong results"):
        asked(tiny).after(result, tmp_path)
    fits = []
    for _ in range(2):
        asked(tiny).after(result, tmp_path)
        fits.append(study.kept_fit(tmp_path))
    assert len(wanted) == 2
    assert fits[0] == fits[1]
    assert fits[0].latency_us == pytest.approx(100)
    assert fits[0].bandwidth_gb_s == pytest.approx(1)
    assert wanted[0].cases[-1].size == 2**26  # the largest power that the gradients fill
    assert wanted[0].implementations == ("ours",)


def test_pictures_are_drawn_without_latency_too(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "kept_fit", lambda folder: ENDLESS)
    found = Buckets.findings(done(tiny), tmp_path)
    save_figures(tmp_path / "a.png", found.figures)
    assert write_page(tmp_path / "buckets.html", found).is_file()
