"""The rungs of experts: exact in float64, and up to what rounding explains below."""

import numpy as np
import pytest
from msgspec.structs import replace

from compare.contract.request import Rung
from compare.spec.experiment import Data, Experiment, Model, Precision, Train
from tests.support.records import CLIMBED, OF_EXPERTS, climbed, make_record, make_steps, tensors_of

MODEL = Model(n_layer=2, n_head=2, n_embd=8, block_size=8, vocab_size=256, n_experts=4, experts_per_token=2)
TRAIN = Train(max_iters=4, batch_size=4, gradient_accumulation_steps=2)


def spec(dtype: str) -> Experiment:
    return Experiment(
        model=MODEL, train=TRAIN, precision=Precision(dtype=dtype), data=Data(source="synthetic")
    )


def turned(experiment: Experiment, tokens: int) -> dict:
    """Tensors of a run whose first tokens of block 1 and pass 1 have expert 3 in the place of 0, or reverse;
    and steps that count so."""
    tensors = tensors_of(experiment)
    experts = tensors[Rung.ROUTING]["experts"].copy()
    chosen = experts[1, 1].reshape(-1, 2)[:tokens]
    for pair in chosen:
        gone = pair[0]
        pair[0] = next(e for e in range(4) if e not in pair)
        pair.sort()
        assert gone not in pair
    tensors[Rung.ROUTING] = {"experts": experts}
    counts = [np.bincount(layer.ravel(), minlength=4).tolist() for layer in experts]
    return {
        "tensors": tensors,
        "steps": [replace(s, tokens_per_expert=counts) for s in make_steps(experiment)],
    }


@pytest.mark.parametrize(
    ("dtype", "tokens", "passes"), [("float64", 0, True), ("float64", 1, False), ("float32", 1, True)]
)
def test_routing_is_exact_in_float64_only(tmp_path, dtype, tokens, passes):
    experiment = spec(dtype)
    reference = make_record(tmp_path / "reference", experiment)
    verdict = climbed(reference, make_record(tmp_path / "other", experiment, **turned(experiment, tokens)))
    assert verdict.passed == passes, verdict.sentence()
    assert {result.rung for result in verdict.rungs} == {*CLIMBED, *OF_EXPERTS}
    share = tokens / (2 * 2 * 4 * 8 * 2)  # one of two choices of a token
    assert verdict.error("later_routing") == pytest.approx(share)
    if tokens:
        worst = next(result.worst for result in verdict.rungs if result.rung == "later_routing")
        first = "the first in pass 1, block 1, sequence 0, position 0: expert 2 instead of 0"
        assert worst == f"1 of 256 choices, {first}"
    if not passes:
        assert verdict.failure.rung == "later_routing"


def test_rerouted_tokens_fail_and_explain(tmp_path):
    experiment = spec("float32")
    reference = make_record(tmp_path / "reference", experiment)
    many = climbed(reference, make_record(tmp_path / "many", experiment, **turned(experiment, 8)))
    assert many.failure.rung == "later_routing"
    parted = turned(experiment, 1)
    parted["tensors"][Rung.GRADIENTS] = {n: 2 * g for n, g in parted["tensors"][Rung.GRADIENTS].items()}
    sentence = climbed(reference, make_record(tmp_path / "parted", experiment, **parted)).sentence()
    assert sentence.startswith("FAIL at gradients: ")
    assert sentence.endswith("position 0: expert 2 instead of 0")


@pytest.mark.parametrize(("tokens", "times", "fails"), [(0, 1.1, True), (1, 1.1, False), (1, 1.5, True)])
def test_rerouted_token_changes_gradients(tmp_path, tokens, times, fails):
    """One rerouted token of 64 explains a gradient that is 1.1 times the reference's, and not 1.5 times."""
    experiment = spec("float16")
    reference = make_record(tmp_path / "reference", experiment)
    other = turned(experiment, tokens)
    router = "blocks.1.mlp.router.weight"
    gradients = other["tensors"][Rung.GRADIENTS]
    other["tensors"][Rung.GRADIENTS] = {**gradients, router: times * gradients[router]}
    verdict = climbed(reference, make_record(tmp_path / "other", experiment, **other))
    (found,) = (result for result in verdict.rungs if result.rung == "gradients")
    assert found.error == pytest.approx(times - 1, rel=1e-3)
    assert (found.error > found.tolerance) == fails, verdict.sentence()


def test_counts_agree_with_the_routing(tmp_path):
    experiment = spec("float64")
    reference, right = make_record(tmp_path / "reference", experiment), make_steps(experiment)
    counts = right[0].tokens_per_expert
    for name, tokens, says in (
        (
            "other",
            [[counts[0][0] - 1, counts[0][1] + 1, *counts[0][2:]], counts[1]],
            "its routing and its tokens_per_expert differ",
        ),
        ("lost", [[counts[0][0] - 1, *counts[0][1:]], counts[1]], "step 0 has (experts, tokens) by block"),
        ("none", [], "step 0 has (experts, tokens) by block"),
    ):
        steps = [replace(right[0], tokens_per_expert=tokens), *right[1:]]
        verdict = climbed(reference, make_record(tmp_path / name, experiment, steps=steps))
        assert verdict.failure.rung == "request", name
        assert says in verdict.sentence(), name
    later = [*right[:3], replace(right[3], tokens_per_expert=[counts[0], [0, 0, 64, 64]])]
    verdict = climbed(reference, make_record(tmp_path / "later", experiment, steps=later))
    assert verdict.failure.rung == "tokens_per_expert"
    assert verdict.failure.worst == "block 1 in step 3"


@pytest.mark.parametrize(
    ("dtype", "step", "passes"), [("bfloat16", 4, True), ("bfloat16", 3, False), ("float32", 4, False)]
)
def test_counts_in_16_bits_for_four_steps(tmp_path, dtype, step, passes):
    experiment = replace(spec(dtype), train=replace(TRAIN, max_iters=6))
    reference, steps = make_record(tmp_path / "reference", experiment), make_steps(experiment)
    steps[step] = replace(steps[step], tokens_per_expert=[[128, 0, 0, 0], [0, 0, 64, 64]])
    verdict = climbed(reference, make_record(tmp_path / "other", experiment, steps=steps))
    worst = {result.rung: result.worst for result in verdict.rungs}["tokens_per_expert"]
    assert verdict.passed == passes, verdict.sentence()
    assert ("(only the first 4 steps were compared)" in worst) == (dtype == "bfloat16")
