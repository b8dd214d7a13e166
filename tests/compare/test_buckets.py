"""`shardpair buckets`: its cases, overheads round by round, the prediction, and how it is shown."""

import json
from pathlib import Path

import msgspec
import pytest
from benches import TIMING, bench_of, measurement_of

from compare.cli import main
from compare.commands import buckets as command
from compare.commands import report
from compare.contract.collective_bench import make_row
from compare.execute.launch import EngineError
from compare.host.json_files import write_json
from compare.judge.bench import BenchResult, FailedLaunch, save
from compare.judge.bucket_study import ALONE, BucketStudy, study_of
from compare.judge.closed_forms.buckets import bucket_sizes
from compare.judge.collective_fit import Fit, fits_of
from compare.numerics.parameters import parameter_count, storage_dtype
from compare.present.report.buckets import save_picture, write_page
from compare.spec.experiment import Experiment, ExperimentError, edited, load
from compare.studies import buckets as study
from compare.studies.bench import BenchInterrupted
from compare.studies.buckets import default_bucket_mb, fitted_all_reduce, plan_study
from compare.studies.cases import Settings
from compare.studies.collectives import RESULT, CollectiveBench

FIT = Fit(implementation="ours", kind="all_reduce", ranks=2, latency_us=100.0, bandwidth_gb_s=0.5, misfit=0.1)
ALONE_MS = 10.0


def planned(experiment: Experiment, **given) -> BenchResult:
    fields = {
        "devices": 2,
        "bucket_mb": (0.001, 0.02),
        "timing": TIMING,
        "rounds": 5,
        "anyway": True,
        "settings": Settings(),
    }
    return plan_study("buckets-test", experiment, **fields | given)


def timed(experiment: Experiment) -> BenchResult:
    """Five rounds, each slower than the last: case i costs i ms beyond the one without communication."""
    plan = planned(experiment)
    done = [
        measurement_of(case, number, wall_ms=ALONE_MS + number + extra)
        for number in range(1, 6)
        for extra, case in enumerate([plan.cases[-1], *plan.cases[:-1]])
    ]
    return bench_of(plan.cases, measurements=done, busy_cores=[0.0] * 5)


def test_cases_share_a_block_and_differ_only_in_how_gradients_are_reduced(tiny):
    *others, alone = planned(tiny).cases
    assert alone.variant == ALONE
    assert alone.experiment.layout.devices == 1
    assert alone.experiment.train.batch_size == tiny.train.batch_size // 2
    assert [case.variant for case in others] == ["flat", "naive", "overlapped", "0.001 MB", "0.02 MB"]
    assert len({case.block for case in (alone, *others)}) == 1
    same = {
        edited(case.experiment, {"layout": {"gradient_sync": "flat", "bucket_mb": 25.0}}) for case in others
    }
    assert len(same) == 1
    assert next(iter(same)).train.max_iters == TIMING.steps
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
    result = timed(tiny)
    found = study_of(result, FIT)
    assert [point.overhead_ms.median for point in found.points] == pytest.approx([1, 2, 3, 4, 5])
    assert all(point.overhead_ms.low == pytest.approx(point.overhead_ms.median) for point in found.points)
    assert found.alone_ms == pytest.approx(ALONE_MS + 3)
    flat, naive, overlapped, small, large = found.points
    assert flat.buckets == 1
    assert (
        naive.buckets == overlapped.buckets == 2 * 12 + 4
    )  # parameters: 12 a block, 2 embeddings, last norm
    assert 1 < large.buckets < small.buckets <= naive.buckets
    assert found.best is small  # though flat has the least overhead, it has no bucket to choose


def test_the_prediction_is_the_closed_form_s(tiny):
    found = study_of(timed(tiny), msgspec.structs.replace(FIT, latency_us=10.0))
    size = parameter_count(tiny.model) * 8
    assert found.gradient_bytes == size
    assert found.predicted_bucket_mb == pytest.approx((size * 0.5e9 * 10e-6) ** 0.5 / 1e6)
    assert found.predicted_buckets * found.predicted_bucket_mb * 1e6 == pytest.approx(size)
    without_latency = msgspec.structs.replace(FIT, latency_us=0.0, bandwidth_gb_s=msgspec.UNSET)
    assert study_of(timed(tiny), without_latency).predicted_bucket_mb == 0.0


def test_a_case_that_failed_is_no_point(tiny):
    result = timed(tiny)
    lost = result.cases[0].name
    kept = [one for one in result.measurements if one.case != lost]
    found = study_of(msgspec.structs.replace(result, measurements=kept), FIT)
    assert [point.name for point in found.points] == ["naive", "overlapped", "0.001 MB", "0.02 MB"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"devices": 1}, "nothing to reduce on fewer than 2"),
        ({"devices": 3}, "not divisible by --devices 3"),
        ({"bucket_mb": (1.0, 1.0)}, "give each once"),
        ({"bucket_mb": (0.0,)}, "bucket_mb"),
        ({"rounds": 0}, "--rounds 0"),
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


def ready(monkeypatch, result: BenchResult, folder: Path) -> None:
    """The command finds its rounds and its fit done."""
    monkeypatch.setattr(command, "run_bench", lambda *_, **__: (result, folder))
    monkeypatch.setattr(command, "fitted_all_reduce", lambda *_, **__: FIT)


def test_the_command_prints_and_keeps_the_study(tiny, tmp_path, monkeypatch, capsys):
    ready(monkeypatch, timed(tiny), tmp_path)
    assert main(["buckets", "demo", "--picture", str(tmp_path / "a.png")]) == 0
    printed = capsys.readouterr().out
    assert "o = 100 us, w = 0.50 GB/s" in printed
    assert "measured best 0.001 MB: 4.0 ms [4.0, 4.0] beyond 13.0 ms without communication" in printed
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    kept = msgspec.json.decode((tmp_path / "buckets.json").read_bytes(), type=BucketStudy)
    assert kept == study_of(timed(tiny), FIT)
    assert (tmp_path / "buckets.html").read_text().count("<svg") == 1
    save(timed(tiny), tmp_path)
    monkeypatch.setattr(report, "kept_fit", lambda folder: FIT)
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == printed.replace("a.png", "")
    assert main(["buckets", "demo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["points"][0]["name"] == "flat"


def test_a_failure_is_in_the_exit_code_and_on_the_page(tiny, tmp_path, monkeypatch, capsys):
    result = timed(tiny)
    failure = FailedLaunch(round=1, case=result.cases[0].name, why="rank 1 was killed")
    ready(monkeypatch, msgspec.structs.replace(result, failures=[failure]), tmp_path)
    assert main(["buckets", "demo"]) == 1
    assert "rank 1 was killed" in capsys.readouterr().out
    assert "rank 1 was killed" in (tmp_path / "buckets.html").read_text()
    nothing = msgspec.structs.replace(result, measurements=[], failures=[failure])
    ready(monkeypatch, nothing, tmp_path)
    assert main(["buckets", "demo"]) == 1
    assert "rank 1 was killed" in capsys.readouterr().err


def test_ctrl_c_says_how_to_go_on(tiny, tmp_path, monkeypatch, capsys):
    result = timed(tiny)

    def interrupted(*_, **__):
        raise BenchInterrupted("shardpair bench", tmp_path)

    monkeypatch.setattr(command, "run_bench", interrupted)
    monkeypatch.setattr(command, "read_bench", lambda folder: result)
    assert main(["buckets", "demo"]) == 130
    said = " ".join(capsys.readouterr().err.split())
    assert "Kept: 5 of 5 rounds" in said
    assert f"shardpair buckets --continue {tmp_path}" in said.replace("\n", "")


def test_a_plan_starts_nothing(capsys):
    assert main(["buckets", "demo", "--dry_run"]) == 0
    assert "naive" in capsys.readouterr().out


def test_the_all_reduce_is_timed_once_a_study_unless_it_went_wrong(tiny, tmp_path, monkeypatch):
    result = timed(edited(tiny, {"model": {"n_layer": 4, "n_embd": 512}}))  # 100 MB of gradients
    asked = []

    def run_requests(requests, left_out, *, run_dir, **_):
        (request,) = requests.values()
        asked.append(request)
        seconds = {case: 1e-4 + case.size / 1e9 for case in request.cases}
        rows = [
            make_row("ours", case, ranks=2, seconds=time, iterations=5, wrong=int(len(asked) == 1))
            for case, time in seconds.items()
        ]
        Path(run_dir).mkdir()
        write_json(
            Path(run_dir, RESULT),
            CollectiveBench(
                command="",
                created_utc="",
                machine="",
                platform="cpu",
                git_commit="",
                git_dirty=False,
                requests={"torchpar-2": request},
                rows=rows,
                fits=fits_of(rows),
            ),
        )

    monkeypatch.setattr(study, "run_requests", run_requests)
    monkeypatch.setattr(study, "busy_cores", lambda: 0.0)
    options = {"settings": Settings(), "quiet": True}
    with pytest.raises(EngineError, match="wrong results"):
        fitted_all_reduce(tmp_path, result, **options)
    fits = [fitted_all_reduce(tmp_path, result, **options) for _ in range(2)]
    assert len(asked) == 2
    assert fits[0] == fits[1]
    assert fits[0].latency_us == pytest.approx(100)
    assert fits[0].bandwidth_gb_s == pytest.approx(1)
    assert asked[0].cases[-1].size == 2**26  # the largest power that the gradients fill
    assert asked[0].implementations == ("ours",)


def test_pictures_are_drawn_without_latency_too(tiny, tmp_path):
    endless = msgspec.structs.replace(FIT, latency_us=0.0, bandwidth_gb_s=msgspec.UNSET)
    found = study_of(timed(tiny), endless)
    save_picture(tmp_path / "a.png", found)
    assert write_page(tmp_path, timed(tiny), found).is_file()
