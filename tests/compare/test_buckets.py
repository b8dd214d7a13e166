"""`shardpair buckets`: its closed forms, cases, overheads round by round, and how it is shown."""

import json
import math
from pathlib import Path

import msgspec
import pytest
from benches import HERE, TIMING, measurement_of

from compare.cli import main
from compare.contract.collective_bench import CollectiveTimes, make_row
from compare.execute.launch import EngineError
from compare.judge.collective_fit import Fit
from compare.judge.outcome import Outcome, save
from compare.numerics.parameters import parameter_count
from compare.spec.experiment import Experiment, edited, load
from compare.studies import collectives
from compare.studies.buckets import (
    ALONE,
    Buckets,
    best_buckets,
    buckets_of,
    default_bucket_mb,
    exposed_ms,
    overlapped_ms,
    points_of,
)
from compare.studies.presets import spread, with_layout

FIT = Fit(implementation="ours", kind="all_reduce", ranks=2, latency_us=100.0, bandwidth_gb_s=2.0, misfit=0.1)
ENDLESS = msgspec.structs.replace(FIT, latency_us=0.0, bandwidth_gb_s=None)
SIZE, ALONE_MS = 40e6, 10.0


def clock_ms(buckets: int, *, backward_s: float, beside: bool) -> float:
    """Time beyond backward of a step: each bucket is reduced after it is full, and after those before."""
    network_s = 0.0
    for number in range(1, buckets + 1):
        full_s = number * backward_s if beside else buckets * backward_s
        network_s = max(network_s, full_s) + SIZE / buckets / FIT.bytes_per_s + 1e-4
    return 1e3 * (network_s - buckets * backward_s)


def test_the_closed_forms_are_what_a_clock_says():
    for buckets in (1, 2, 7, 14, 40):
        transfer_s = SIZE / buckets / FIT.bytes_per_s
        for form, beside in ((overlapped_ms, True), (exposed_ms, False)):
            found = clock_ms(buckets, backward_s=transfer_s, beside=beside)
            assert form(SIZE, buckets, FIT) == pytest.approx(found)


def test_no_other_number_of_buckets_is_better_than_the_best():
    best = best_buckets(SIZE, FIT)
    least = overlapped_ms(SIZE, best, FIT)
    assert least == pytest.approx(2e3 * math.sqrt(SIZE * 1e-4 / 2e9))
    assert SIZE / best == pytest.approx(math.sqrt(SIZE * 2e9 * 1e-4))
    overheads = [clock_ms(n, backward_s=SIZE / n / 2e9, beside=True) for n in range(1, 100)]
    assert abs(1 + overheads.index(min(overheads)) - best) <= 1
    assert best_buckets(10.0, FIT) == 1.0  # less than a bucket is none
    assert best_buckets(SIZE, ENDLESS) == math.inf


def asked(experiment: Experiment, **given) -> Buckets:
    """The command, as its command line would give it for this experiment."""
    fields = {"bucket_mb": (0.001, 0.02), "window": TIMING.window, "windows": TIMING.windows, "anyway": True}
    sections = {name: getattr(experiment, name) for name in Experiment.__struct_fields__}
    return Buckets(**sections, **{**fields, **given})


def done(experiment: Experiment) -> Outcome:
    """Five rounds, each slower than the last: case i costs i ms beyond the one without communication."""
    plan = asked(experiment).planned()
    *cases, alone = plan.cases.values()
    kept = {
        case.name: {
            number: msgspec.to_builtins(measurement_of(case, number, wall_ms=ALONE_MS + number + extra))
            for number in range(1, 6)
        }
        for extra, case in enumerate([alone, *cases])
    }
    circumstances = msgspec.structs.replace(HERE, busy_cores=[0.0] * 5)
    more = {**plan.more, "fit": msgspec.to_builtins(FIT)}
    return msgspec.structs.replace(plan, kept=kept, circumstances=circumstances, more=more)


def test_cases_share_a_block_and_differ_only_in_how_gradients_are_reduced(tiny):
    *others, alone = asked(tiny).planned().cases.values()
    assert alone.variant == ALONE
    assert alone.experiment.layout.devices == 1
    assert alone.experiment.train.batch_size == tiny.train.batch_size // 2
    assert [case.variant for case in others] == ["flat", "naive", "overlapped", "0.001 MB", "0.02 MB"]
    assert len({case.block for case in (alone, *others)}) == 1
    same = {
        edited(case.experiment, {"layout": {"gradient_sync": "flat", "bucket_mb": 25.0}}) for case in others
    }
    assert len(same) == 1
    assert next(iter(same)).layout.dp_replicate == 2


def test_default_sizes_are_worth_timing():
    for name in ("check", "gpt2-124m"):
        reduced = with_layout(spread(load(name), "single"), dp_replicate=2)
        sizes = default_bucket_mb(reduced)
        counts = [buckets_of(with_layout(reduced, gradient_sync="bucketed", bucket_mb=mb)) for mb in sizes]
        assert list(sizes) == sorted(sizes)
        assert counts == sorted(counts, reverse=True)
        assert len(set(counts)) >= 3, name  # a parameter larger than a bucket has one of its own


def test_overheads_are_taken_within_rounds_and_a_case_that_failed_is_no_point(tiny):
    result = done(tiny)
    alone_ms, points = points_of(result, FIT)
    assert [point.overhead_ms.median for point in points] == pytest.approx([1, 2, 3, 4, 5])
    assert all(point.overhead_ms.low == pytest.approx(point.overhead_ms.median) for point in points)
    assert alone_ms == pytest.approx(ALONE_MS + 3)
    flat, naive, overlapped, small, large = points
    assert flat.buckets == 1
    # parameters: 12 a block, 2 embeddings, last norm
    assert naive.buckets == overlapped.buckets == 2 * 12 + 4
    assert 1 < large.buckets < small.buckets <= naive.buckets
    kept = {name: rounds for name, rounds in result.kept.items() if name != next(iter(result.cases))}
    _, points = points_of(msgspec.structs.replace(result, kept=kept), FIT)
    assert [point.name for point in points] == ["naive", "overlapped", "0.001 MB", "0.02 MB"]


def test_the_study_is_printed_and_drawn(tiny, tmp_path, capsys):
    save(done(tiny), tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "o = 100 us, w = 2.00 GB/s" in printed
    assert "measured best 0.001 MB: 4.0 [4.0, 4.0] ms beyond 13.0 ms without communication" in printed
    assert main(["report", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rows"][0]["name"] == "flat"
    size = parameter_count(tiny.model) * 8
    assert told["best_bucket_mb"] == pytest.approx(size / best_buckets(size, FIT) / 1e6)


def test_the_all_reduce_is_timed_once_a_study_unless_it_went_wrong(tiny, tmp_path, monkeypatch):
    planned = asked(edited(tiny, {"model": {"n_layer": 4, "n_embd": 512}})).planned()  # 100 MB of gradients
    requests = []

    def time_collectives(request, folder: Path, **_) -> CollectiveTimes:
        requests.append(request)
        wrong = int(len(requests) == 1)
        rows = [
            make_row("ours", case, ranks=2, seconds=1e-4 + case.size / 1e9, wrong=wrong)
            for case in request.cases
        ]
        return CollectiveTimes(rows=rows, device_kind="cpu", versions={}, threads="", hosts=[])

    monkeypatch.setattr(collectives, "time_collectives", time_collectives)
    with pytest.raises(EngineError, match="wrong results"):
        asked(tiny).after(planned, tmp_path)
    found = asked(tiny).after(planned, tmp_path)
    assert asked(tiny).after(found, tmp_path) == found
    assert len(requests) == 2
    fit = msgspec.convert(found.more["fit"], Fit)
    assert fit.latency_us == pytest.approx(100)
    assert fit.bandwidth_gb_s == pytest.approx(1)
    assert requests[0].cases[-1].size == 2**26  # the largest power that the gradients fill
    assert requests[0].implementations == ("ours",)
