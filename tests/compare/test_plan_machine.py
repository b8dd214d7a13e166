"""Machines: files that are read strictly, and the link of each axis of a mesh."""

import pytest

from compare.plan.machine import CHIPS, read_machine
from compare.spec.experiment import ExperimentError

GOOD = """platform = "gpu"
devices_inside = 4
memory_bytes = 1e9
memory_bytes_per_s = 1e9
peak = { float32 = 1e12 }
inside = { bytes_per_s = 4e9 }
across = { bytes_per_s = 1e9, share = 0.5 }
"""
PLATFORM = 'platform = "gpu"'


def refused(text: str) -> str:
    with pytest.raises(ExperimentError) as error:
        read_machine(text)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_every_chip_that_ships_is_read():
    assert {"a100", "h100", "h200", "b200", "v5e", "v5p", "v6e"} == set(CHIPS)
    for name in CHIPS:
        machine = read_machine(f"{name}x8")
        assert machine.devices == 8
        assert machine.peak["bfloat16"] > machine.sustained.get("bfloat16", 0.0)
        assert machine.across.bytes_per_s < machine.inside.bytes_per_s
    assert read_machine("h200x8").inside == read_machine("h100x8").inside
    assert read_machine("v5e-256").devices == 256
    assert read_machine("H100x8").inside == read_machine("h100x8").inside


def test_a_word_that_names_none_is_refused_in_a_line():
    for text, says in {
        "tpu9x8": "no such chip (there are a100, b200",
        "h100": "how many devices? Write h100x64",
        "": "is empty",
        "h100x0": "`int` >= 1 - at `devices`",
        "h100x10000000": "`int` <= 1000000 - at `devices`",
        "h100x12": "12 devices do not fill hosts of 8",
        "none.tomlx8": "does not exist: give a chip or a TOML file",
    }.items():
        assert says in refused(text)


def test_a_file_that_cannot_be_is_refused_in_a_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(GOOD)
    assert read_machine("mine.tomlx8").hosts == 2
    for old, new, says in (
        ("bytes_per_s = 4e9", "bytes_per_s = -4e9", "at `inside.bytes_per_s`"),
        ("share = 0.5", "share = 1.5", "at `across.share`"),
        ("share = 0.5", "speed = 0.5", "unknown field `speed`"),
        (PLATFORM, "", "missing required field `platform`"),
        (PLATFORM, f'{PLATFORM}\nlike = "mine.toml"', "like must be the name of a chip: a100, b200"),
        (PLATFORM, "platform =", "mine.toml: "),
        ("float32 = 1e12", "", "at `peak`"),
        ("float32 = 1e12", "float32 = 989.5", "at `peak[...]`"),
        ("memory_bytes_per_s = 1e9", "memory_bytes_per_s = 3350", "at `memory_bytes_per_s`"),
        ("bytes_per_s = 4e9", "bytes_per_s = 450", "at `inside.bytes_per_s`"),
        (
            PLATFORM,
            f"{PLATFORM}\nsustained = {{ float32 = 2e12 }}",
            "sustained.float32 = 2e+12 is above the peak",
        ),
        (PLATFORM, f"# {'x' * 20_000}\n{PLATFORM}", "longer than 16384 bytes"),
    ):
        (tmp_path / "mine.toml").write_text(GOOD.replace(old, new))
        assert says in refused("mine.tomlx8")


def test_an_axis_has_the_link_of_its_place():
    """H100: inside 450 GB/s x 0.65, across 50 GB/s x 0.9 a card, of all cards of a ring in one host."""
    machine = read_machine("h100x64")
    assert machine.link_of(8, 1) == pytest.approx(292.5e9)
    assert machine.link_of(4, 2) == pytest.approx(292.5e9)
    assert machine.link_of(8, 8) == pytest.approx(45e9)
    assert machine.link_of(16, 4) == pytest.approx(90e9)  # two neighbours in each host
    assert machine.link_of(64, 1) == pytest.approx(292.5e9)  # eight cards are faster than NVLink's share


def test_an_axis_of_a_torus_has_one_of_its_dims():
    """v5e: a pod of 16 x 16 has two dims of 90 GB/s both ways."""
    machine = read_machine("v5e-256")
    for degree, stride in ((256, 1), (16, 16), (16, 1), (2, 1)):
        assert machine.link_of(degree, stride) == pytest.approx(0.9 * 90e9)
    assert read_machine("v5e-512").link_of(2, 256) == pytest.approx(0.9 * 3.125e9)
