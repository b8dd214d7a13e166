"""Published rows: what they say of themselves, and what the null model says of them."""

import statistics
import tomllib

import msgspec
import pytest

from compare.plan.published import FILE, PublishedRow, held_rows, null_errors, read_tables

TABLES = {table.name: table for table in read_tables()}
WEIGHTS = {"M": 1e6, "B": 1e9, "T": 1e12}


def settings(table) -> list[PublishedRow]:
    return [msgspec.convert({**table.common, **row}, PublishedRow) for row in table.rows]


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_row_is_of_the_size_that_it_is_named_for(table):
    """Weights of blocks, embedding and head, against the name: 16B. That tells whether the two are tied."""
    for row in settings(table):
        word = row.name.replace(",", "").split()[0]
        named = float(word[:-1]) * WEIGHTS[word[-1]]
        ends = (1 if row.tied else 2) * row.vocabulary * row.width
        held = row.layers * row.shape.block_parameters + ends
        assert held == pytest.approx(named, rel=0.05), row.name


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_row_uses_its_devices_and_is_predicted(table):
    held = held_rows(table)
    assert len(held) == sum(len(row.repeat) for row in settings(table))
    for row in held:
        assert 0 < row.measured_mfu < 0.75
        assert 0 < row.prediction.mfu < 1
        assert row.error == pytest.approx(row.measured_mfu / row.prediction.mfu - 1)


def test_measured_figures_are_those_of_the_file():
    """TFLOP/s of Megatron's README, and seconds of arXiv 2205.05198: 22B is 1.10 s, or 41.5 % of the peak."""
    (h100,) = (held_rows(TABLES[name]) for name in ("Megatron-LM, H100",))
    assert h100[-1].measured_mfu == pytest.approx(459.9 / 989.5)
    assert h100[-1].devices == 6144
    a100 = {row.name: row for row in held_rows(TABLES["Megatron, A100"])}
    assert a100["22B selective"].measured_mfu == pytest.approx(0.415, abs=0.005)
    assert a100["1T selective"].measured_mfu == pytest.approx(0.563, abs=0.005)
    titan = held_rows(TABLES["torchtitan, H100"])
    assert (titan[0].measured_mfu, titan[1].measured_mfu) == pytest.approx((0.337, 0.390), abs=0.002)


def test_the_null_model_says_the_median():
    file = tomllib.loads(FILE.read_text())["tables"]
    table = next(table for table in file if table["name"] == "MaxText, v5e")
    mfus = [mfu for row in table["rows"] for mfu in row["mfus"]]
    errors = null_errors(held_rows(TABLES["MaxText, v5e"]))
    assert errors == pytest.approx([mfu / statistics.median(mfus) - 1 for mfu in mfus])
