"""Predictions of published rows, each from its own settings, with the same constants: data/published.toml.

The null model says the median utilisation of a table for each of its rows: a planner must beat it.
"""

import math
import statistics
from pathlib import Path

import msgspec
from msgspec import Struct

from compare.contract.communication import (
    ACTIVATION_GRADIENTS,
    ACTIVATIONS,
    GRADIENTS,
    LOSS,
    PARAMETERS,
    REPLICATED_GRADIENTS,
    TIED_GRADIENTS,
)
from compare.judge.closed_forms.memory import parameters_of_stage
from compare.plan.compute import Shape
from compare.plan.machine import Machine, read_machine
from compare.plan.predict import Prediction, predict
from compare.spec.engines.registry import REFERENCE
from compare.spec.experiment import Experiment, Layout, Model, Precision, Train, revalidate

FILE = Path(__file__).parents[1] / "data" / "published.toml"
ENGINE = REFERENCE
"""Whose closed forms: each rank sends what it needs to, as by hand."""
FORM_BYTES = 4.0
"""Of a number in the textbook: rows are predicted as float32, and scaled to their own widths."""


class PublishedRow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one row, and what was measured."""

    name: str
    heads: int
    width: int
    layers: int
    context: int
    vocabulary: int
    attention: int = 0
    """Width of all heads together; 0 for `width`."""
    keys: int = 0
    """Width of the heads of keys; 0 for `attention`."""
    mlp: int = 0
    """0 for four times `width`."""
    gates: int = 1
    tied: bool = False
    repeat: tuple[int, ...] = (1,)
    """Pods, each with a replica: as many rows."""
    dp_shard: int = 1
    zero: int = 0
    tp: int = 1
    sequence_parallel: bool = False
    pp: int = 1
    chunks: int = 1
    sequences: int = 0
    """Of a step; 0 for one pass."""
    rows: int = 1
    """Sequences of a pass that a data-parallel share has."""
    remat: str = "none"
    fused: bool = True
    hidden: list[str] = []
    number_bytes: float = 2
    gradient_bytes: float = 4
    memory_bytes_per_s: float = 0
    """Where the chip is not the one of the file."""
    mfus: list[float] = []
    tflops: float = 0
    """A device's, by MFU's count."""
    seconds: float = 0
    """Of a step."""
    tokens_per_s: float = 0
    """A device's."""

    @property
    def shape(self) -> Shape:
        """Sizes of the model."""
        attention = self.attention or self.width
        return Shape(
            layers=self.layers,
            width=self.width,
            attention=attention,
            keys=self.keys or attention,
            mlp=self.mlp or 4 * self.width,
            gates=self.gates,
            vocabulary=self.vocabulary,
            context=self.context,
            heads=self.heads,
        )

    def experiment(self, pods: int) -> Experiment:
        """The layout, of a model of nanoGPT's with the same streams: `ways` has the sizes that differ."""
        share = self.dp_shard * pods
        passes = (self.sequences or share * self.rows) // (share * self.rows)
        whole = self.pp > 1
        layout = Layout(
            dp_replicate=pods,
            dp_shard=self.dp_shard,
            zero=msgspec.convert(self.zero, Layout.__annotations__["zero"]),
            tp=self.tp,
            sequence_parallel=self.sequence_parallel,
            pp=self.pp,
            chunks=self.chunks,
            schedule="interleaved" if self.chunks > 1 else "1f1b",
            microbatches=passes if whole else 1,
            remat="full" if self.remat == "full" else "none",
        )
        train = Train(
            batch_size=share * self.rows * (passes if whole else 1),
            gradient_accumulation_steps=1 if whole else passes,
        )
        model = Model(
            n_layer=self.layers,
            n_head=self.heads,
            n_embd=self.width,
            block_size=self.context,
            vocab_size=self.vocabulary,
        )
        return revalidate(
            Experiment(model=model, train=train, layout=layout, precision=Precision(dtype="float32"))
        )

    def ways(self, experiment: Experiment) -> dict[str, object]:
        """How it is carried out, and by how much its bytes differ from the closed form's."""
        held = parameters_of_stage(ENGINE, experiment, stage=self.pp - 1)
        ends = self.vocabulary * self.width * (1 if self.tied or self.pp > 1 else 2)
        weights = self.layers / self.pp * self.shape.block_parameters + ends
        ratio = weights / sum(parameter.size for parameter in held)
        streams = dict.fromkeys((ACTIVATIONS, ACTIVATION_GRADIENTS, LOSS), self.number_bytes / FORM_BYTES)
        gradients = dict.fromkeys((REPLICATED_GRADIENTS, TIED_GRADIENTS), self.gradient_bytes / FORM_BYTES)
        return dict(
            shape=self.shape,
            number=self.number_bytes,
            stream=self.number_bytes,
            fused=self.fused,
            hidden=frozenset(self.hidden),
            remat=self.remat,
            scale={
                "weights": ratio,
                PARAMETERS: ratio * self.number_bytes / FORM_BYTES,
                GRADIENTS: ratio * self.gradient_bytes / FORM_BYTES,
                **streams,
                **gradients,
            },
        )


class PublishedTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows of one source."""

    name: str
    source: str
    assumed: str
    """What it does not say."""
    machine: str
    common: dict[str, object]
    rows: list[dict[str, object]]


class HeldRow(Struct, frozen=True, kw_only=True):
    """One row, measured and predicted."""

    table: str
    name: str
    devices: int
    measured_mfu: float
    prediction: Prediction

    @property
    def error(self) -> float:
        """Predicted over measured step time, less 1."""
        return self.measured_mfu / self.prediction.mfu - 1


def read_tables() -> list[PublishedTable]:
    """All tables. Raises msgspec.DecodeError for a row that is not as it should be."""
    return msgspec.toml.decode(FILE.read_bytes(), type=dict[str, list[PublishedTable]])["tables"]


def held_rows(table: PublishedTable) -> list[HeldRow]:
    """Every row of a table with its prediction."""
    rows = [msgspec.convert({**table.common, **row}, PublishedRow) for row in table.rows]
    return [_held(table, row, place) for row in rows for place in range(len(row.repeat))]


def _held(table: PublishedTable, row: PublishedRow, place: int) -> HeldRow:
    pods = row.repeat[place]
    experiment = row.experiment(pods)
    machine = _machine(table, row, experiment)
    shape = row.shape
    found = predict(ENGINE, experiment, machine, **row.ways(experiment))
    peak = machine.peak["float32"]
    flops = shape.flops_per_token
    tokens = experiment.tokens_per_step / experiment.layout.devices
    if row.mfus:
        measured = row.mfus[place]
    elif row.tflops:
        measured = row.tflops * 1e12 / peak
    else:
        rate = row.tokens_per_s or tokens / row.seconds
        measured = flops * rate / peak
    name = f"{row.name.split(',')[0]}, {pods} pods" if pods > 1 else row.name
    return HeldRow(
        table=table.name,
        name=name,
        devices=experiment.layout.devices,
        measured_mfu=measured,
        prediction=found,
    )


def _machine(table: PublishedTable, row: PublishedRow, experiment: Experiment) -> Machine:
    """The machine of a row: of several pods, or slices of one, each is a torus of its own."""
    devices = experiment.layout.devices
    machine = read_machine(f"{table.machine}x{devices}")
    inside = devices // row.repeat[-1] if len(row.repeat) > 1 else machine.devices_inside
    inside = row.tp * row.dp_shard * row.pp if len(row.repeat) > 1 else inside
    rate = row.memory_bytes_per_s or machine.memory_bytes_per_s
    products = {
        field: {"float32": rates["bfloat16"]} if (rates := getattr(machine, field)) else {}
        for field in ("peak", "sustained")
    }
    return msgspec.structs.replace(machine, devices_inside=inside, memory_bytes_per_s=rate, **products)


def mean_error(errors: list[float]) -> float:
    """Mean of their sizes."""
    return statistics.fmean(map(abs, errors))


def null_errors(rows: list[HeldRow]) -> list[float]:
    """Errors of the null model: of step time, if every row had the median utilisation."""
    median = statistics.median(row.measured_mfu for row in rows)
    return [row.measured_mfu / median - 1 for row in rows]


def worst_error(errors: list[float]) -> float:
    """The largest of their sizes."""
    return max(map(abs, errors), default=math.nan)
