"""The table of hosts and devices: coordinates, and the axes that cross hosts."""

import re

import pytest

from compare.commands.run.hosts import crosses, crossing_words, host_table, mesh_figure
from compare.show.figures import svg
from compare.spec.experiment import Layout

HSDP = Layout(dp_replicate=2, dp_shard=2, zero=3)
ALL_AXES = Layout(dp_shard=2, zero=3, tp=2, pp=2, microbatches=2)
CROSSING = [
    (Layout(dp_replicate=4), 2, {"dp_replicate"}),
    (HSDP, 4, {"dp_replicate", "dp_shard"}),
    (Layout(dp_replicate=2, tp=2), 2, {"dp_replicate"}),
    (ALL_AXES, 2, {"pp"}),
    (ALL_AXES, 4, {"pp", "dp_shard"}),
]


@pytest.mark.parametrize(("layout", "hosts", "axes"), CROSSING)
def test_axes_that_cross_hosts(layout, hosts, axes):
    assert {axis for axis in layout.axes if crosses(axis, layout, hosts)} == axes


def test_host_table_has_coordinates():
    layout = Layout(dp_replicate=2, tp=2)
    table = host_table(layout, ["a", "a", "b", "b"])
    assert [(row.head.text, [cell.text for cell in row.cells]) for row in table.rows] == [
        ("a", ["device 0: dp_replicate 0, tp 0", "device 1: dp_replicate 0, tp 1"]),
        ("b", ["device 2: dp_replicate 1, tp 0", "device 3: dp_replicate 1, tp 1"]),
    ]
    assert table.below == "Across hosts: dp_replicate; inside one: tp."
    assert "With tp every layer waits" in crossing_words(Layout(tp=2), 2)


def test_mesh_has_a_box_for_each_device():
    """Rows are places along the outer axes, columns along the innermost. Several hosts have names."""
    figure = mesh_figure(ALL_AXES, ["a"] * 4 + ["b"] * 4)
    assert figure.title == "The mesh: pp 2 by dp_shard 2 by tp 2"
    assert "Across hosts: pp; inside one: dp_shard, tp." in figure.caption
    text = re.findall(r">([^<>\n]+)</t", svg(figure))
    assert {"tp 0", "tp 1", "pp 1, dp_shard 0", "device 7", "a", "b"} <= set(text)
    alone = mesh_figure(Layout(dp_replicate=9), ["a"] * 9)
    assert (alone.caption, alone.is_wide) == ("On one host.", True)
    assert {"a", "device 8"}.isdisjoint(re.findall(r">([^<>\n]+)</t", svg(alone)))
