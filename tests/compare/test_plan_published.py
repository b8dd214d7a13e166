"""Published tables of Megatron, MaxText and torchtitan: the planner's errors of step time may not grow.

No constant of the planner was fitted to a row. The null model says the median utilisation of its table for
every row, and has seen the rows: the planner beats it on the A100 alone.
"""

import statistics

import pytest
from published import held_rows, read_tables, rows_of

TABLES = read_tables()
WEIGHTS = {"M": 1e6, "B": 1e9, "T": 1e12}
ERRORS = {
    "Megatron-LM, H100": (0.134, 0.278, 0.050),
    "Megatron, A100": (0.055, 0.121, 0.150),
    "MaxText, v5e": (0.120, 0.266, 0.069),
    "MaxText, v5p": (0.121, 0.238, 0.066),
    "torchtitan, H100": (0.387, 0.519, 0.113),
}
"""Mean and worst error of the planner, and the null model's mean, as docs/plan.md has them."""


def test_errors_do_not_grow():
    for name, (mean, worst, null) in ERRORS.items():
        rows = held_rows(TABLES[name])
        errors = [abs(row.error) for row in rows]
        assert statistics.fmean(errors) <= mean + 0.0006, name
        assert max(errors) <= worst + 0.0006, name
        median = statistics.median(row.measured_mfu for row in rows)
        null_errors = [abs(row.measured_mfu / median - 1) for row in rows]
        assert statistics.fmean(null_errors) == pytest.approx(null, abs=0.0006), name
    assert TABLES.keys() == ERRORS.keys()


def test_every_row_is_of_the_size_that_it_is_named_for():
    """Weights of blocks, embedding and head, against the name: 16B. That tells whether the two are tied."""
    for table in TABLES.values():
        for row in rows_of(table):
            word = row.name.replace(",", "").split()[0]
            named = float(word[:-1]) * WEIGHTS[word[-1]]
            ends = (1 if row.tied else 2) * row.vocabulary * row.width
            held = row.layers * row.shape.block_parameters + ends
            assert held == pytest.approx(named, rel=0.05), row.name


def test_measured_figures_are_those_of_the_sources():
    """TFLOP/s of Megatron's README, and seconds of arXiv 2205.05198: 22B is 1.10 s, or 41.5 % of the peak."""
    h100 = held_rows(TABLES["Megatron-LM, H100"])
    assert h100[-1].measured_mfu == pytest.approx(459.9 / 989.5)
    assert h100[-1].devices == 6144
    a100 = {row.name: row for row in held_rows(TABLES["Megatron, A100"])}
    assert a100["22B selective"].measured_mfu == pytest.approx(0.415, abs=0.005)
