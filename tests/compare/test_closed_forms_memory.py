"""The closed form of what a device holds, against sums by hand; and that it fails what is not sharded."""

import msgspec
import pytest

from compare.judge.strategy import AT_REST
from compare.numerics.parameters import parameter_count
from compare.spec.engines.registry import STUDIED
from compare.spec.experiment import edited, load
from compare.theory.memory import KINDS, bytes_at_rest, excess

CHECK = load("check")
WHOLE = 8 * parameter_count(CHECK.model)  # bytes in float64
C, V, T, L = (CHECK.model.n_embd, CHECK.model.vocab_size, CHECK.model.block_size, CHECK.model.n_layer)
BLOCK = 12 * C * C + 13 * C  # 4 C^2 of attention and 8 C^2 of the MLP; 9 C of biases, 4 C of two norms
REPEATED = 6 * C  # of a block under tp: two norms (4 C) and two row biases (2 C)


def held(engine="torch-manual", experiment=CHECK, **fields):
    layout = msgspec.structs.replace(experiment.layout, **fields)
    return bytes_at_rest(engine, msgspec.structs.replace(experiment, layout=layout))


@pytest.mark.parametrize(
    ("zero", "parts"),
    [(1, {"optimizer"}), (2, {"optimizer", "gradients"}), (3, {"optimizer", "gradients", "parameters"})],
)
def test_zero_stages(zero, parts):
    form = held(dp_shard=4, zero=zero)
    for kind, copies in zip(KINDS, (1, 1, 2), strict=True):
        assert form[kind] == [copies * WHOLE / (4 if kind in parts else 1)] * 4
    # FSDP2 holds shards between the steps of ZeRO 2.
    assert zero != 2 or held("torch-library", dp_shard=4, zero=2) == held(dp_shard=4, zero=3)


def test_tp_replicates_norms_and_row_biases():
    (mine, *others) = held(tp=4)["parameters"]
    assert set(others) == {mine}
    repeated = L * REPEATED + T * C + 2 * C
    assert mine == 8 * ((parameter_count(CHECK.model) - repeated) / 4 + repeated)


def test_pipelines_keep_the_ends_at_the_ends():
    first, *middle, last = held(pp=4)["parameters"]
    assert first == 8 * (BLOCK + V * C + T * C)
    assert middle == [8 * BLOCK] * 2
    assert last == 8 * (BLOCK + V * C + 2 * C)
    assert held("jax-manual", pp=4)["parameters"] == [8 * (BLOCK + V * C + T * C + 2 * C)] * 4


@pytest.mark.parametrize(
    ("name", "momentum", "copies"), [("adamw", 0.0, 2), ("sgd", 0.9, 1), ("sgd", 0.0, 0)]
)
def test_optimizer_state(name, momentum, copies):
    optimizer = msgspec.structs.replace(CHECK.optimizer, name=name, momentum=momentum)
    form = held(experiment=msgspec.structs.replace(CHECK, optimizer=optimizer))
    assert form["optimizer"] == [copies * WHOLE]


@pytest.mark.parametrize("engine", STUDIED)
def test_excess(engine):
    form = held(engine, dp_shard=4, zero=3)
    exact = {kind: [round(size) for size in sizes] for kind, sizes in form.items()}
    assert abs(excess(exact, form)) < 1e-4
    whole = exact | {"optimizer": [2 * WHOLE] * 4}
    assert excess(whole, form) == pytest.approx(3.0)
    one_has_more = exact | {"parameters": [*exact["parameters"][:3], round(1.1 * exact["parameters"][3])]}
    assert excess(one_has_more, form) > AT_REST
    assert excess(exact | {"gradients": [0] * 4}, form) == -1.0
    without = form | {"optimizer": [0.0] * 4}
    assert excess(exact, without) == 1.0


MEASURED = {
    ("torch-compiler", 3): ([744, 744, 744, 392, 88], [744] * 5, [1600, 1600, 1600, 896, 288]),
    ("torch-library", 3): ([744] * 5, [744] * 5, [1600, 1600, 1600, 896, 288]),
    ("torch-library", 1): ([2712] * 5, [2712] * 5, [1124, 1128, 1132, 1080, 1072]),
    ("torch-manual", 3): ([*[552] * 4, 504], [*[552] * 4, 504], [*[1216] * 4, 1120]),
    ("jax-manual", 1): ([3800] * 5, [3800] * 5, [1520] * 5),
    ("jax-manual", 2): ([3800] * 5, [760] * 5, [1520] * 5),
}
"""Bytes of parameters, gradients and moments of five ranks, by engine and ZeRO stage."""


@pytest.mark.parametrize(("engine", "zero"), MEASURED)
def test_fullest_device_has_its_rounding(engine, zero):
    """A model of which five devices divide nothing, as DTensor, FSDP2 and we cut it, and as JAX pads it."""
    sizes = {"n_layer": 2, "n_embd": 3, "n_head": 1, "vocab_size": 5, "block_size": 8}
    spec = edited(CHECK, {"model": sizes, "layout": {"dp_shard": 5, "zero": zero}})
    form, most = (bytes_at_rest(engine, spec, rounds_up=up) for up in (False, True))
    held = dict(zip(KINDS, MEASURED[engine, zero], strict=True))
    assert abs(excess(held, form, most)) < 0.02
    assert zero == 1 or excess(held, form) > 0.01
    assert excess(held | {"optimizer": [*held["optimizer"][:4], 2000]}, form, most) > AT_REST
