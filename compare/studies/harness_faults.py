"""Faults that only the harness can notice: records that are not what was asked for; each must turn red.

Two engines are trained once. For every fault their records are copied and damaged, mostly both alike: then
they agree with each other, and only a harness that holds them against the request can tell.
"""

import shutil
from pathlib import Path
from typing import Any

from msgspec import Struct

from compare.contract import record as files
from compare.contract.record import read_record
from compare.contract.request import Rung
from compare.host.tensors import RecordError
from compare.judge.ladder import EVALUATIONS, FINAL, REQUEST, STRATEGY, climb
from compare.spec.axes import TP
from compare.studies import damages
from compare.studies.damages import SINGLE, Damage

PAIR = ("reference", "candidate")
REFERENCE, CANDIDATE = (("reference",), ("candidate",))
LATER, READING = "later_weights", "reading"
"""Where a record is caught that cannot be read at all."""


class HarnessFault(Struct, frozen=True, kw_only=True):
    """One way in which a record is not what was asked for."""

    name: str
    rung: str
    """The first rung that it must turn red."""
    description: str
    damage: Damage
    """What is done to an engine's folder."""
    whose: tuple[str, ...] = PAIR
    """Records that are damaged: both alike, or one."""

    @property
    def both(self) -> bool:
        """True if the two still agree with each other."""
        return self.whose == PAIR


class Caught(Struct, frozen=True, kw_only=True):
    """Outcome of one fault."""

    fault: str
    description: str
    both: bool
    expected: str
    rung: str
    """The first rung that failed; empty if none did."""
    sentence: str

    @property
    def is_right(self) -> bool:
        """True if it was caught where it should be."""
        return self.rung == self.expected


def plant_all(trained: Path, scratch: Path) -> list[Caught]:
    """Damage copies of two records in every known way, and hold them against each other.

    Args:
        trained: a folder with the records `reference`, `candidate` and `single`, the last one of the
            candidate's engine on one device.
        scratch: an empty folder for the copies.

    Returns:
        One entry for each fault; the first is a control without any.
    """
    control = HarnessFault(name="none", rung="", description="nothing: must pass", damage=lambda folder: None)
    return [_plant(fault, trained, scratch / fault.name) for fault in (control, *HARNESS_FAULTS.values())]


def _plant(fault: HarnessFault, trained: Path, scratch: Path) -> Caught:
    for name in (*PAIR, SINGLE):
        shutil.copytree(trained / name, scratch / name)
    for name in PAIR:
        if name in fault.whose:
            fault.damage(scratch / name)
    try:
        verdict = climb(*(read_record(scratch / name) for name in PAIR))
        rung, sentence = verdict.failure.rung if verdict.failure else "", verdict.sentence()
    except RecordError as error:
        rung, sentence = READING, str(error)
    return Caught(
        fault=fault.name,
        description=fault.description,
        both=fault.both,
        expected=fault.rung,
        rung=rung,
        sentence=sentence,
    )


def _fault(name: str, rung: str, description: str, damage: Damage, **more: Any) -> HarnessFault:
    return HarnessFault(name=name, rung=rung, description=description, damage=damage, **more)


HARNESS_FAULTS = {
    fault.name: fault
    for fault in (
        _fault("ignored_layout", REQUEST, "it trained on one device", damages.ignore_layout, whose=CANDIDATE),
        _fault(
            "silent_axis",
            REQUEST,
            "nothing was ever sent",
            damages.garble(files.LEDGER, lambda text: b"{}\n"),
        ),
        _fault("another_engine", REQUEST, "another engine's record", damages.manifest(engine="jax-compiler")),
        _fault(
            "another_experiment", REQUEST, "another experiment's records", damages.manifest(train__seed=1)
        ),
        _fault("another_platform", REQUEST, "they ran on GPUs", damages.manifest(platform="gpu")),
        _fault("another_corpus", REQUEST, "they read other data", damages.manifest(corpus_sha256="0" * 64)),
        _fault(
            "another_dtype",
            REQUEST,
            "float32 against a float64 reference",
            damages.manifest(precision__dtype="float32"),
            whose=CANDIDATE,
        ),
        _fault("fewer_steps", REQUEST, "both stopped after 2 steps", damages.steps(lambda steps: steps[:2])),
        _fault(
            "repeated_steps",
            REQUEST,
            "step numbers repeat",
            damages.steps(lambda steps: [*steps[:2], *steps[:-2]]),
        ),
        _fault("wrong_lr", REQUEST, "another learning rate from step 1 on", damages.scaled("lr", first=1)),
        _fault(
            "diverged", REQUEST, "the loss is not a number", damages.scaled("loss", first=1, by=float("nan"))
        ),
        _fault("no_tensors", REQUEST, "a recorder that leaves no tensors", damages.without(*Rung)),
        *(_fault(f"no_{rung}", REQUEST, f"both lack {rung}", damages.without(rung)) for rung in Rung),
        _fault(
            "lacking_tensor",
            REQUEST,
            "both lack one gradient",
            damages.tensors(Rung.GRADIENTS, damages.lacking),
        ),
        _fault(
            "misnamed_tensor",
            REQUEST,
            "both misname one gradient",
            damages.tensors(Rung.GRADIENTS, damages.misnamed),
        ),
        _fault(
            "flat_tensors",
            REQUEST,
            "weights of another shape",
            damages.tensors(Rung.FIRST_WEIGHTS, damages.flattened),
        ),
        _fault(
            "rounded_tensors",
            REQUEST,
            "moments in float16",
            damages.tensors(Rung.FIRST_V, damages.in_float16),
        ),
        _fault(
            "zero_gradients", REQUEST, "all gradients are zero", damages.tensors(Rung.GRADIENTS, damages.zero)
        ),
        _fault("trained_nothing", REQUEST, "the first step moves no weight", damages.train_nothing),
        _fault("other_weights", "initial_weights", "they begin with other weights", damages.begin_elsewhere),
        _fault(
            "wrong_norm",
            "grad_norm",
            "a norm that is not the gradients'",
            damages.scaled("grad_norm", first=0),
        ),
        _fault(
            "wrong_later_norm",
            "norm_curve",
            "a wrong norm after step 0",
            damages.scaled("grad_norm", first=1),
            whose=CANDIDATE,
        ),
        _fault(
            "wrong_update", "first_update", "both round their weights to 16 bits", damages.round_first_weights
        ),
        _fault(
            "no_last_update",
            FINAL,
            "the last step moves no weight",
            damages.tensors(Rung.FINAL_WEIGHTS, damages.zero),
            whose=CANDIDATE,
        ),
        _fault(
            "reference_alone",
            REQUEST,
            "the reference's learning rate is wrong",
            damages.scaled("lr", first=1),
            whose=REFERENCE,
        ),
        _fault(
            "another_batch",
            REQUEST,
            "both are to guess the tokens that they were given",
            damages.tensors(Rung.BATCH, lambda named: named | {"targets": named["inputs"]}),
        ),
        _fault("negative_times", REQUEST, "steps of less than no time", damages.each(step_time_ms=-1.0)),
        _fault(
            "other_throughput", REQUEST, "tokens/s that do not fit the times", damages.each(tokens_per_s=1.0)
        ),
        _fault("all_watched", REQUEST, "every step is the watched one", damages.each(instrumented=True)),
        _fault("no_memory", REQUEST, "devices that held nothing", damages.without_memory),
        _fault(
            "other_axis", REQUEST, "gradients over an axis that the layout has not", damages.ledger(axis=TP)
        ),
        _fault(
            "turned_query_bias", LATER, "a query bias turned round", damages.turn_query_bias, whose=CANDIDATE
        ),
        _fault(
            "better_validation",
            EVALUATIONS,
            "validation losses 10 % lower",
            damages.evaluations(damages.better_validation),
            whose=CANDIDATE,
        ),
        _fault(
            "lacking_evaluation",
            REQUEST,
            "both lack the last evaluation",
            damages.evaluations(damages.lacking_last),
        ),
        _fault("no_work", STRATEGY, "neither says what it computed", damages.without_work),
        _fault("other_products", STRATEGY, "products in bfloat16", damages.work(products={"bfloat16": 9})),
        _fault(
            "reference_products",
            STRATEGY,
            "the reference's products are in bfloat16",
            damages.work(products={"bfloat16": 9}),
            whose=REFERENCE,
        ),
        _fault(
            "other_remat", STRATEGY, "all is computed again", damages.work(again=["activations", "products"])
        ),
        _fault("whole_logits", STRATEGY, "logits of other positions", damages.work(logits_positions=[1])),
        _fault("other_sync", STRATEGY, "gradients in 99 messages", damages.ledger(calls=99)),
        _fault("other_messages", STRATEGY, "gradients sent in bfloat16", damages.ledger(dtype="bfloat16")),
        _fault("incomplete_ledger", STRATEGY, "a ledger that is not complete", damages.with_a_problem),
        _fault(
            "other_hosts",
            STRATEGY,
            "its devices were on two hosts, and nothing crossed",
            damages.manifest(hosts=["one", "another"]),
        ),
        _fault("held_more", STRATEGY, "optimizer state twice as large", damages.held_twice),
        _fault("failed_as_well", READING, "an error.json beside the manifest", damages.failed_as_well),
        _fault("no_steps", READING, "an emptied steps file", damages.garble(files.STEPS, lambda text: b"")),
        _fault(
            "garbled_tensors",
            READING,
            "a torn file of tensors",
            damages.garble(f"{Rung.GRADIENTS}.safetensors", lambda content: content[: len(content) // 2]),
        ),
    )
}
