"""Sides and engines are declared once, and exactly one engine is the reference."""

from compare.spec.engines.registry import ENGINES, REFERENCE, SIDES, STUDIED


def test_six_engines_of_two_sides_and_one_reference():
    assert list(SIDES) == ["jaxpar", "torchpar"]
    assert list(STUDIED) == [
        "jax-compiler",
        "jax-explicit",
        "jax-manual",
        "torch-manual",
        "torch-library",
        "torch-compiler",
    ]
    assert REFERENCE == "torch-manual"
    assert all(engine.side in SIDES for engine in ENGINES.values())
    assert len(ENGINES) == sum(len(side.engines) + len(side.peers) for side in SIDES.values())
