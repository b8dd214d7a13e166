"""Predictions of published rows, each from its own settings, with the same constants: data/published.toml."""

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
        rows, whole = self.dp_shard * pods * self.rows, self.pp > 1
        passes = (self.sequences or rows) // rows
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
            batch_size=rows * (passes if whole else 1),
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
        number, gradient = self.number_bytes / FORM_BYTES, self.gradient_bytes / FORM_BYTES
        return dict(
            shape=self.shape,
            number=self.number_bytes,
            stream=self.number_bytes,
            fused=self.fused,
            hidden=frozenset(self.hidden),
            remat=self.remat,
            scale={
                "weights": ratio,
                PARAMETERS: ratio * number,
                GRADIENTS: ratio * gradient,
                **dict.fromkeys((ACTIVATIONS, ACTIVATION_GRADIENTS, LOSS), number),
                **dict.fromkeys((REPLICATED_GRADIENTS, TIED_GRADIENTS), gradient),
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

    name: str
    devices: int
    measured_mfu: float
    prediction: Prediction

    @property
    def error(self) -> float:
        """Predicted over measured step time, less 1."""
        return self.measured_mfu / self.prediction.mfu - 1


def read_tables() -> dict[str, PublishedTable]:
    """All tables, by name."""
    tables = msgspec.toml.decode(FILE.read_bytes(), type=dict[str, list[PublishedTable]])["tables"]
    return {table.name: table for table in tables}


def rows_of(table: PublishedTable) -> list[PublishedRow]:
    return [msgspec.convert({**table.common, **row}, PublishedRow) for row in table.rows]


def held_rows(table: PublishedTable) -> list[HeldRow]:
    """Every row of a table with its prediction."""
    return [_held(table, row, place) for row in rows_of(table) for place in range(len(row.repeat))]


def _held(table: PublishedTable, row: PublishedRow, place: int) -> HeldRow:
    experiment = row.experiment(row.repeat[place])
    machine = _machine(table, row, experiment)
    peak, devices = machine.peak["float32"], experiment.layout.devices
    if row.mfus:
        measured = row.mfus[place]
    elif row.tflops:
        measured = row.tflops * 1e12 / peak
    else:
        rate = row.tokens_per_s or experiment.tokens_per_step / devices / row.seconds
        measured = row.shape.flops_per_token * rate / peak
    prediction = predict(ENGINE, experiment, machine, **row.ways(experiment))
    return HeldRow(name=row.name, devices=devices, measured_mfu=measured, prediction=prediction)


def _machine(table: PublishedTable, row: PublishedRow, experiment: Experiment) -> Machine:
    """The machine of a row: of several pods, or slices of one, each is a torus of its own."""
    devices = experiment.layout.devices
    machine = read_machine(f"{table.machine}x{devices}")
    inside = row.tp * row.dp_shard * row.pp if len(row.repeat) > 1 else machine.devices_inside
    rate = row.memory_bytes_per_s or machine.memory_bytes_per_s
    products = {
        field: {"float32": rates["bfloat16"]} if (rates := getattr(machine, field)) else {}
        for field in ("peak", "sustained")
    }
    return msgspec.structs.replace(machine, devices_inside=inside, memory_bytes_per_s=rate, **products)
