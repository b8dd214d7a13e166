"""The first place where two traces differ, from made-up arrays, and the words for it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import UNSET
from msgspec.structs import replace

from compare.cli import main
from compare.commands.check import ERROR_OF_TRACE
from compare.contract.record import Record, Step
from compare.contract.request import Request
from compare.contract.trace import COPY, places, split_dims, trace_request, why_no_trace, write_trace
from compare.contract.trace import read_trace as read_files
from compare.execute.launch import EngineError
from compare.judge.outcome import read_outcome
from compare.judge.trace import Difference, first_difference, ranges_of
from compare.judge.verdict import RungResult, Verdict
from compare.run import study
from compare.spec.experiment import Experiment, Layout, Model, Precision, Train
from tests.support.made_up import Engines
from tests.support.records import make_request

MODEL = Model(n_layer=2, n_head=4, n_embd=16, block_size=16)
FEW = Train(batch_size=8, gradient_accumulation_steps=2)
SPLIT = Layout(dp_replicate=2, cp=4, tp=2, zigzag=True)


def experiment_of(layout: Layout = SPLIT, **model: int) -> Experiment:
    precision = Precision(dtype="float64")
    return Experiment(model=replace(MODEL, **model), train=FEW, layout=layout, precision=precision)


def trace_of(experiment: Experiment) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    forward, backward = (
        {place.name: random.normal(size=place.shape) for place in places(experiment)} for _ in range(2)
    )
    return forward, backward


def difference(experiment: Experiment, direction: str, **wrong: np.ndarray) -> Difference:
    """The finding if these places differ in one direction."""
    right = trace_of(experiment)
    forward, backward = ({**tensors} for tensors in right)
    {"forward": forward, "backward": backward}[direction].update(wrong)
    return first_difference(right, (forward, backward), experiment, dtype="float64")


def test_places_in_order_of_computation():
    names = [place.name for place in places(experiment_of())]
    assert names[:3] == ["embedding", "blocks.0.norm1", "blocks.0.attention.qkv"]
    assert names[-3:] == ["blocks.1.residual", "norm", "loss"]
    assert "blocks.1.mlp.up" in names
    with_experts = {place.name: place for place in places(experiment_of(n_experts=4))}
    assert with_experts["blocks.1.mlp.router"].shape == (2, 8, 16, 4)
    assert "blocks.1.mlp.up" not in with_experts


@pytest.mark.parametrize("layout", [SPLIT, Layout(dp_shard=4, ep=2, zero=1, tp=2, sequence_parallel=True)])
def test_devices_split_each_dim_once(layout):
    for place in places(experiment_of(layout)):
        for axis, (dim, parts) in split_dims(place, layout).items():
            assert len(parts) == layout.axes[axis]
            assert sorted(np.concatenate(parts)) == [*range(place.shape[dim])]


def test_equal_traces_agree():
    found = difference(experiment_of(), "forward")
    assert (found.place, found.error) == ("", 0.0)
    assert found.sentence() == (
        "the trace agrees exactly at all places: the mistake is in a weight's own gradient or later"
    )


def test_first_output_in_order_of_computation():
    experiment = experiment_of()
    forward, _ = trace_of(experiment)
    wrong = {name: forward[name] + 1e-3 for name in ("blocks.1.norm2", "blocks.0.mlp.down", "loss")}
    found = difference(experiment, "forward", **wrong)
    assert (found.direction, found.place, found.before, found.ratio) == (
        "forward", "blocks.0.mlp.down", 0.0, UNSET
    )  # fmt: skip
    assert found.where == "on all devices of dp_replicate and cp and tp"


def test_first_gradient_in_order_of_backward():
    """Backward reaches block 1 before block 0."""
    experiment = experiment_of()
    _, backward = trace_of(experiment)
    names = ("blocks.1.mlp.up", "blocks.0.mlp.down", "embedding")
    found = difference(experiment, "backward", **{name: 2 * backward[name] for name in names})
    assert (found.direction, found.place, found.ratio) == ("backward", "blocks.1.mlp.up", 2.0)
    assert "blocks.1.mlp.up (1e+00; its input agrees exactly): 2.00 times the reference" in found.sentence()


ROWS_4_TO_7 = {"dp_replicate": [1]}
NAMED = [
    ("norm", np.s_[:, 4:], "at rows 4-7 = device 1 of dp_replicate", ROWS_4_TO_7),
    ("norm", np.s_[:, 5], "at row 5 on device 1 of dp_replicate", ROWS_4_TO_7),
    ("norm", np.s_[:, :, [2, 3, 12, 13]], "at positions 2-3, 12-13 = device 1 of cp", {"cp": [1]}),
    ("norm", np.s_[1, :, 4:12], "at pass 1, positions 4-11 = devices 2-3 of cp", {"cp": [2, 3]}),
    ("norm", np.s_[:, :, ::2], "at 8 of 16 positions", {}),
    ("blocks.0.attention.core", np.s_[..., 2:, :], "at heads 2-3 = device 1 of tp", {"tp": [1]}),
    ("blocks.0.attention.qkv", np.s_[..., 1, :, :], "at keys", {}),
    (
        "blocks.0.attention.qkv",
        np.s_[..., 1:, 0, :],
        "at keys and values, head 0 on device 0 of tp",
        {"tp": [0]},
    ),
    ("blocks.0.mlp.up", np.s_[..., :32], "at features 0-31 = device 0 of tp", {"tp": [0]}),
    (
        "blocks.0.mlp.up",
        np.s_[:, 3, ..., ::2],
        "at row 3 on device 0 of dp_replicate, 32 of 64 features",
        {"dp_replicate": [0]},
    ),
]
"""A place, its wrong indices, the words for them, and the devices that are named."""


@pytest.mark.parametrize(("place", "index", "where", "devices"), NAMED)
def test_wrong_indices_and_devices(place, index, where, devices):
    experiment = experiment_of()
    forward, _ = trace_of(experiment)
    wrong = forward[place].copy()
    wrong[index] += 1.0
    found = difference(experiment, "forward", **{place: wrong})
    assert found.where.startswith(where)
    assert found.devices == devices
    others = [axis for axis in ("dp_replicate", "cp", "tp") if axis not in devices]
    assert found.where.removeprefix(where) == f", on all devices of {' and '.join(others)}" * bool(others)


def test_one_device_needs_no_words():
    experiment = experiment_of(Layout())
    forward, _ = trace_of(experiment)
    assert difference(experiment, "forward", norm=0 * forward["norm"]).sentence() == (
        "forward first differs at norm (1e+00; its input agrees exactly): zero"
    )


def test_keys_of_groups():
    """With grouped queries a head of keys lies behind its queries."""
    experiment = experiment_of(Layout(), n_kv_head=2)
    forward, _ = trace_of(experiment)
    wrong = forward["blocks.0.attention.qkv"].copy()
    wrong[..., 2, :] += 1.0
    found = difference(experiment, "forward", **{"blocks.0.attention.qkv": wrong})
    assert found.where == "at keys"


def test_a_copy_of_tp_differs():
    experiment = experiment_of(Layout(tp=2))
    forward, _ = trace_of(experiment)
    copy = {f"norm{COPY}1": forward["norm"] / 2}
    found = difference(experiment, "forward", **copy)
    assert (found.ratio, found.where, found.devices) == (0.5, "only on device 1 of tp", {"tp": [1]})
    by_rounding = {f"norm{COPY}1": forward["norm"] * (1 + 1e-15)}
    assert not difference(experiment, "forward", **by_rounding).place
    both = {"norm": 2 * forward["norm"], f"norm{COPY}1": 2 * forward["norm"]}
    assert difference(experiment, "forward", **both).where == "on all devices of tp"


def test_constant_factor_in_16_bits():
    """Rounding is allowed with the factor; an error of the size of the limit has none."""
    experiment = experiment_of(Layout())
    forward, backward = trace_of(experiment)
    noise = 1e-3 * np.random.default_rng(1).normal(size=forward["norm"].shape)
    for changed, ratio in ((2.83 * forward["norm"] + noise, 2.83), (forward["norm"] + 1e2 * noise, UNSET)):
        found = first_difference(
            (forward, backward), ({**forward, "norm": changed}, backward), experiment, dtype="bfloat16"
        )
        assert found.place == "norm"
        assert found.ratio == (ratio if ratio is UNSET else pytest.approx(ratio, abs=1e-3))


def test_limit_of_the_dtype():
    experiment = experiment_of(Layout())
    forward, backward = trace_of(experiment)
    off = {**forward, "norm": forward["norm"] * (1 + 1e-6)}
    for dtype, place in (("float64", "norm"), ("float32", "")):
        found = first_difference((forward, backward), (off, backward), experiment, dtype=dtype)
        assert found.place == place


def test_rounding_near_large_gradients_is_no_difference():
    """A gradient that is zero in exact arithmetic is rounding."""
    experiment = experiment_of(Layout())
    forward, backward = trace_of(experiment)
    zero = {**backward, "embedding": 1e-20 * backward["embedding"]}
    other = {**backward, "embedding": -3e-20 * backward["embedding"]}
    assert not first_difference((forward, zero), (forward, other), experiment, dtype="float64").place


def test_not_finite():
    experiment = experiment_of(Layout())
    forward, _ = trace_of(experiment)
    wrong = forward["norm"].copy()
    wrong[0, 1, 2] = np.nan
    found = difference(experiment, "forward", norm=wrong)
    assert found.sentence() == (
        "forward first differs at norm (not finite; its input agrees exactly) at pass 0, row 1, position 2"
    )


def test_ranges():
    assert ranges_of([0, 1, 2, 5, 7, 8]) == ["0-2", "5", "7-8"]


def test_files_have_all_places(tmp_path):
    experiment = experiment_of(Layout())
    forward, backward = trace_of(experiment)
    write_trace(tmp_path, experiment, forward, backward)
    read = read_files(tmp_path)
    assert {*read[0]} == {*read[1]} == {*forward}
    assert (read[1]["norm"] == backward["norm"]).all()
    with pytest.raises(ValueError, match=r"backward.* norm has shape None instead of"):
        write_trace(tmp_path, experiment, forward, {n: x for n, x in backward.items() if n != "norm"})
    with pytest.raises(ValueError, match=r"forward.* norm has shape \(1,\) instead of"):
        write_trace(tmp_path, experiment, {**forward, "norm": np.zeros(1)}, backward)


def test_request_of_a_trace():
    asked = make_request(experiment_of(Layout(compile="block", dp_replicate=2)))
    traced = trace_request(replace(asked, timeout_s=7.0, cache_dir="cache"))
    assert (traced.trace, traced.ladder, traced.steps, traced.timeout_s) == (True, False, 1, 7.0)
    assert traced.experiment.layout == Layout(dp_replicate=2, compile="none")
    assert traced.experiment.model == asked.experiment.model


def test_why_there_is_no_trace():
    small, large = experiment_of(Layout()), experiment_of(Layout(), n_layer=500, block_size=1024)
    assert why_no_trace(make_request(small)) == ""
    assert why_no_trace(make_request(small, engine="nanogpt-loop")).startswith("nanogpt-loop is a peer")
    assert "lower train.batch_size" in why_no_trace(make_request(large))


def test_verdict_has_the_place():
    results = [RungResult(rung="loss", error=1.0, tolerance=1e-10, worst="loss of step 0")]
    verdict = Verdict(candidate="a", reference="b", rungs=results)
    trace = Difference(direction="forward", place="norm", error=4e-3, before=1e-15)
    assert replace(verdict, trace=trace).sentence() == (
        "FAIL at loss: loss of step 0 is off by 1.00e+00 (tolerance 1e-10); "
        "forward first differs at norm (4e-03; its input agrees to 1e-15)"
    )
    assert replace(verdict, untraced="a peer").sentence().endswith("; not traced: a peer")


class TracedEngines(Engines):
    """Made-up engines whose traces and losses are equal, except on two devices if they are `wrong`."""

    wrong = False

    def steps(self, request: Request) -> list[Step]:
        right = super().steps(request)
        off = 1e-3 * (self.wrong and request.experiment.layout.devices > 1)
        return [replace(step, loss=step.loss + off) for step in right]

    def __call__(self, request: Request, folder: Path, **how: Any) -> Record:
        record = super().__call__(request, folder, **how)
        if request.trace:
            forward, backward = trace_of(request.experiment)
            if self.wrong and request.experiment.layout.devices > 1:
                forward["norm"] = 2 * forward["norm"]
            write_trace(folder, request.experiment, forward, backward)
        return record


@pytest.fixture
def traced_engines(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> TracedEngines:
    made_up = TracedEngines()
    monkeypatch.setattr(study, "launch", made_up)
    return made_up


CHECK = ("check", "tiny.toml", "--presets", "ddp", "--devices", "2", "--run_dir", "c", "--numbers_only")
CASES = ["reference", "torch-manual.ddp"]


def test_failure_is_traced(traced_engines, capsys):
    """Once for the reference, also if two cases fail."""
    traced_engines.wrong = True
    assert main([*CHECK, "--engines", "torch-manual", "torch-library"]) == 1
    assert traced_engines.started == [*CASES, *CASES, "torch-library.ddp", "torch-library.ddp"]
    outcome = read_outcome(Path("c"))
    for verdict in outcome.verdicts:
        assert verdict.failure.rung == "loss"
        assert verdict.trace.place == "norm"
    place = "forward first differs at norm (1e+00; its input agrees exactly): 2.00 times the reference"
    assert place in outcome.sentence()
    assert Path("c/traces/torch-manual.ddp/trace-backward.safetensors").is_file()


def test_passing_case_is_traced_if_asked(traced_engines, capsys):
    assert main([*CHECK, "--engines", "torch-manual", "--trace"]) == 0
    assert traced_engines.started == [*CASES, *CASES]
    assert [request.trace for request in traced_engines.requests] == [False, False, True, True]
    (verdict,) = read_outcome(Path("c")).verdicts
    assert verdict.trace == Difference(error=0.0)
    assert ERROR_OF_TRACE in " ".join(capsys.readouterr().out.split())


def test_trace_without_compilation(traced_engines, capsys):
    traced_engines.wrong = True
    assert main([*CHECK, "--engines", "torch-manual", "--layout.compile", "block"]) == 1
    assert [request.experiment.layout.compile for request in traced_engines.requests][-1] == "none"
    assert read_outcome(Path("c")).verdicts[0].sentence().endswith("(traced without layout.compile = block)")


def test_passing_case_is_not_traced(traced_engines, capsys):
    assert main([*CHECK, "--engines", "torch-manual"]) == 0
    assert traced_engines.started == CASES


def test_trace_that_fails_is_a_reason(traced_engines, capsys):
    traced_engines.wrong = True

    def fail(request: Request, folder: Path, **how: Any) -> Record:
        if request.trace:
            raise EngineError("torch-manual: no memory", exit_code=1)
        return traced_engines(request, folder, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "launch", fail)
        assert main([*CHECK, "--engines", "torch-manual"]) == 1
    (verdict,) = read_outcome(Path("c")).verdicts
    assert verdict.sentence().endswith("; not traced: torch-manual: no memory")
