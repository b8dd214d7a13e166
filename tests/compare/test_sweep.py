"""Sweeps: what runs, what is left out by name, and how figures become rows."""

import csv
import itertools
import json
from pathlib import Path

import msgspec
import pytest
from matplotlib.figure import Figure

from compare.cli import main
from compare.commands.sweep import Sweep
from compare.judge.outcome import read_outcome
from compare.numerics.parameters import parameter_count
from compare.spec.engines.registry import STUDIED
from compare.spec.experiment import to_toml
from compare.text import human_bytes
from tests.support.records import make_steps

SWEEP = ("sweep", "small.toml", "--no_ladder", "--quiet", "--json", "--engines", "torch-manual")


@pytest.fixture
def swept(engines, small, tmp_path, capsys):
    """JSON output and exit code of a sweep of `small`."""
    (tmp_path / "small.toml").write_text(to_toml(small))

    def sweep(*arguments):
        capsys.readouterr()
        code = main([*SWEEP, *arguments])
        return code, json.loads(capsys.readouterr().out)

    return sweep


def asked(small, **fields) -> Sweep:
    return msgspec.structs.replace(
        Sweep(model=small.model, data=small.data, optimizer=small.optimizer, train=small.train), **fields
    )


def names(small, **fields):
    cases, left_out = asked(small, **fields).cases(small)
    return list(cases), left_out


def test_impossible_cases_have_reasons(small):
    _, left_out = names(small, engines=tuple(STUDIED), presets=("ddp", "ddp_flat", "pp_zero_bubble", "hsdp"))
    assert left_out.keys() == {
        *(f"{name}.ddp_flat.2" for name, engine in STUDIED.items() if not engine.offers_choice),
        *(
            f"{name}.pp_zero_bubble.2"
            for name, engine in STUDIED.items()
            if "zero_bubble" not in engine.layouts.schedules
        ),
        "hsdp.2",
    }
    assert left_out["torch-library.ddp_flat.2"].startswith("the same as ddp: ")
    assert "--devices 2: preset hsdp takes a multiple" in left_out["hsdp.2"]


@pytest.mark.parametrize(
    ("variants", "message"),
    [
        (["train.seed=1", "train.seed=1"], "train.seed=1: it is given twice: give each setting once"),
        (["train.seed=1337"], "--variants train.seed=1337: it is the same training as the default"),
        (["train.seed=1", "train.seed= 1"], "train.seed= 1: it is the same training as train.seed=1"),
        (["layout.tp=2"], "layout.tp contradicts --presets fsdp"),
        (["layout.context=ring"], "--variants layout.context=ring has no effect under fsdp"),
        (["model.rope_base=9"], "--variants model.rope_base=9: model.rope_base has an effect only with"),
    ],
)
def test_same_training_is_rejected(engines, capsys, variants, message):
    for command in ("sweep", "check", "memory"):
        assert main([command, "tiny.toml", "--presets", "fsdp", "ddp", "--variants", *variants]) == 2
        assert message in " ".join(capsys.readouterr().err.split())


def test_reference_depends_on_numbers_only(small):
    seeds, remats = ["", "train.seed=1", "train.seed=2"], ["", "layout.remat=full"]
    variants = [",".join(filter(None, both)) for both in itertools.product(remats, seeds)][1:]
    cases, _ = asked(
        small, engines=("torch-manual", "jax-manual"), presets=("ddp",), variants=tuple(variants)
    ).cases(small)
    references = {name: case for name, case in cases.items() if not case.against}
    assert list(references) == ["reference", "reference, train.seed=1", "reference, train.seed=2"]
    assert {case.experiment.layout.remat for case in references.values()} == {"auto"}
    assert len(cases) == 3 + 2 * 6
    assert cases["torch-manual.ddp.2, layout.remat=full,train.seed=2"].against == "reference, train.seed=2"


def test_variant_without_effect_under_a_preset_is_left_out(small):
    cases, left_out = names(
        small, engines=("torch-manual",), presets=("ddp", "pp"), variants=("layout.schedule=gpipe",)
    )
    assert cases == [
        *("reference", "torch-manual.ddp.2", "torch-manual.pp.2"),
        "torch-manual.pp.2, layout.schedule=gpipe",
    ]
    assert left_out == {"ddp.2, layout.schedule=gpipe": "layout.schedule=gpipe has no effect under ddp.2"}


def test_rows_have_the_classic_figures(swept, engines, small):
    def steps(request):
        took = 20.0 / request.experiment.layout.devices
        made = make_steps(request.experiment)
        return [msgspec.structs.replace(step, step_time_ms=took) for step in made]

    engines.steps = steps
    code, found = swept("--presets", "ddp", "fsdp")
    assert code == 0
    one, ddp, _ = found["values"]["rows"]
    assert [row["strategy"] for row in found["values"]["rows"]] == ["single", "ddp", "fsdp"]
    assert ddp["verdict"] == "PASS"
    assert one["verdict"] == ""
    assert (ddp["step_time_ms_median"], ddp["tokens_per_s"]) == (10.0, 8 * 16 / 0.010)
    assert ddp["final_loss"] == 5.5 / 3
    gradients = 8 * parameter_count(small.model)  # float64
    sent = (ddp["comm_bytes"], ddp["comm_wire_bytes"])
    assert (*sent, ddp["peak_mem_bytes"]) == (gradients + 4, gradients + 6, 2000)


def test_sweep_fails_on_other_numbers(swept, engines):
    def steps(request):
        off = 1.1 if request.experiment.layout.dp_shard > 1 else 1.0
        return [
            msgspec.structs.replace(step, loss=off * step.loss) for step in make_steps(request.experiment)
        ]

    engines.steps = steps
    code, found = swept("--presets", "ddp", "fsdp")
    assert (code, found["passed"]) == (1, False)
    assert [row["passed"] for row in found["values"]["rows"]] == [True, True, False]
    assert found["verdict"].startswith("torch-manual.fsdp.2 against reference: FAIL at loss")


BETA = "optimizer.beta2=0.9"
SEEDS = ("train.seed=1", "train.seed=2", f"train.seed=1,{BETA}", f"{BETA},train.seed=2")


def test_seeds_have_mean_and_spread(swept, engines, capsys):
    def steps(request):
        train, beta2 = request.experiment.train, request.experiment.optimizer.beta2
        losses = {1337: 3.0, 1: 4.0, 2: 5.0}
        made = make_steps(request.experiment)
        return [msgspec.structs.replace(step, loss=losses[train.seed] + (beta2 == 0.9)) for step in made]

    engines.steps = steps
    evaluated = ("--train.eval_interval", "3", "--run_dir", "r")
    code, found = swept("--presets", "ddp", "--variants", *SEEDS, *evaluated)
    assert code == 0
    assert {row["validation_loss"] for row in found["values"]["rows"]} == {5.5}
    spread = {(row["strategy"], row["variant"]): row for row in found["values"]["seeds"]}
    assert list(spread) == [*(("single", ""), ("ddp", ""), ("single", BETA), ("ddp", BETA))]
    assert [row["seeds"] for row in spread.values()] == [3, 3, 2, 2]
    assert spread["ddp", ""]["final_loss"] == {"mean": 4.0, "stdev": 1.0}
    assert spread["ddp", BETA]["final_loss"] == {"mean": 5.5, "stdev": 0.5**0.5}
    assert main(["report", "r"]) == 0
    out = capsys.readouterr().out
    assert "4.0000 ± 1.0000" in out
    assert "best validation loss" in " ".join(out.split())


def test_csv_has_each_case_and_its_settings(swept, engines, tmp_path):
    swept("--presets", "ddp", "--variants", *SEEDS[:1], SEEDS[3], "--run_dir", "r")
    with (tmp_path / "r" / "sweep.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["case"] for line in lines] == engines.started
    assert [line["train.seed"] for line in lines] == ["1337", "1337", "1", "1", "2", "2"]
    assert {line["optimizer.beta2"] for line in lines} == {"0.95", "0.9"}
    one, ddp = lines[:2]
    assert (one["strategy"], one["devices"], one["verdict"]) == ("single", "1", "")
    assert (ddp["strategy"], ddp["devices"], ddp["reference"], ddp["verdict"]) == (
        *("ddp", "2", "reference", "PASS"),
    )
    assert float(ddp["final_loss"]) == 5.5 / 3


def test_curves_are_of_settings_and_span_seeds(engines, folder_of_tiny):
    def steps(request):
        return [
            msgspec.structs.replace(step, loss=float(request.experiment.train.seed))
            for step in make_steps(request.experiment)
        ]

    engines.steps = steps
    variants = ["train.seed=1", "layout.remat=full", BETA]
    evaluated = ("--train.eval_interval", "3", "--engines", "torch-manual", "--quiet", "--run_dir", "r")
    assert main(["sweep", "tiny.toml", "--presets", "ddp", "--variants", *variants, *evaluated]) == 0
    training, validation = Sweep.page(read_outcome(Path("r")), Path("r")).figures
    assert [training.title, validation.title] == ["Training loss over steps", "Validation loss over steps"]
    axes = Figure().subplots()
    training.draw(axes)
    assert [line.get_label() for line in axes.lines] == ["default", BETA]
    mean = (3 * 1337 + 2 * 1) / 5  # reference, ddp, remat; and seed 1 of the reference and of ddp
    assert list(axes.lines[0].get_ydata()) == [mean] * 3
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (1, 1337)
    assert main(["report", "r", "--picture", "s.svg"]) == 0
    assert "Validation loss" in (folder_of_tiny / "s.svg").read_text()


def test_dry_run_says_what_checkpoints_take(swept, small, capsys):
    asked = ("--presets", "ddp", "--variants", "train.seed=1", "--checkpoint.every", "1", "--dry_run")
    _, found = swept(*asked)
    each = 3 * 8 * parameter_count(small.model)  # weights and two moments in float64
    assert found["values"]["checkpoint_bytes"] == 4 * 2 * each  # four cases keep two
    _, found = swept(*asked, "--train.eval_interval", "3", "--train.eval_iters", "1")
    assert found["values"]["checkpoint_bytes"] == 4 * 3 * each  # and the best
    assert main([word for word in (*SWEEP, *asked) if word != "--json"]) == 0
    assert f"checkpoints: up to {human_bytes(8 * each)} on disk" in " ".join(capsys.readouterr().out.split())
