"""What crosses hosts: who sends to whom, formulas written out by hand, records that say something else."""

import pytest
from msgspec.structs import replace
from records import make_record

from compare.contract.across_hosts import host_names, numbered, sent_across
from compare.contract.ledger import Ledger
from compare.judge.across_hosts import crossings
from compare.judge.closed_forms.across_hosts import crosses, crossing, host_of
from compare.judge.ledger_lines import line_up
from compare.judge.strategy import strategy_of, with_remat_resolved
from compare.present.host_tables import crossing_table, crossing_words, host_table
from compare.spec.experiment import Layout, edited

HSDP = Layout(dp_replicate=2, dp_shard=2, zero=3)
ALL_AXES = Layout(dp_shard=2, zero=3, tp=2, pp=2, microbatches=2)
BY_HAND = {
    # D / n groups x h hosts x 2 (n - 1) / n, or (n - 1) / n, or the devices that send to another host
    "ddp 4 on 2": (Layout(dp_replicate=4), 2, "all_reduce", "dp_replicate", 1 * 2 * 2 * 3 / 4),
    "ddp 4 on 4": (Layout(dp_replicate=4), 4, "all_reduce", "dp_replicate", 1 * 4 * 2 * 3 / 4),
    "fsdp 4 on 2": (Layout(dp_shard=4, zero=3), 2, "all_gather", "dp_shard", 1 * 2 * 3 / 4),
    "hsdp, replicas": (HSDP, 2, "all_reduce", "dp_replicate", 2 * 2 * 2 * 1 / 2),
    "hsdp, shards": (HSDP, 2, "all_gather", "dp_shard", 0),
    "tp inside": (Layout(dp_replicate=2, tp=2), 2, "all_reduce", "tp", 0),
    "tp 4 on 2": (Layout(tp=4), 2, "all_reduce", "tp", 1 * 2 * 2 * 3 / 4),
    "stages of hosts": (ALL_AXES, 2, "permute", "pp", 4),
    "shards of 4 hosts": (ALL_AXES, 4, "reduce_scatter", "dp_shard", 4 * 2 * 1 / 2 / 2),
    "replicas and shards": (HSDP, 2, "all_reduce", "dp_replicate+dp_shard", 1 * 2 * 2 * 3 / 4),
    "owners": (Layout(dp_shard=4, zero=1), 2, "broadcast", "dp_shard", 1),
}


@pytest.mark.parametrize(("layout", "hosts", "kind", "axis", "expected"), BY_HAND.values(), ids=BY_HAND)
def test_formulas_by_hand(layout, hosts, kind, axis, expected):
    """Of one byte of a device, on the first stage; the sides count the same, group by group."""
    size = 1024
    found = crossing(kind, axis, "activations", size, layout=layout, hosts=hosts, stage=0)
    assert found == size * expected
    assert crosses(axis, layout, hosts) == bool(expected)


def test_who_sends_to_another_host():
    hosts = numbered(["a", "a", "b", "b"])

    def of_each(kind, group=(0, 1, 2, 3)):
        return [sent_across(kind, 400, group, device, hosts) for device in range(4)]

    assert of_each("all_reduce") == [0, 600, 0, 600]
    assert of_each("all_to_all") == [200] * 4
    assert of_each("broadcast") == [0, 400, 0, 0]
    # A ring goes host after host, however a group lists its devices.
    assert of_each("all_gather", (0, 2, 1, 3)) == [0, 300, 0, 300]
    assert sent_across("permute", 400, (1, 2), 1, hosts) == 400
    assert sent_across("permute", 400, (0, 1), 0, hosts) == 0


def test_hosts_of_a_test_are_told_apart():
    assert host_names([("a", 0), ("b", 0), ("a", 1)]) == ["a", "b", "a"]
    assert host_names([("a", 0), ("a", 1), ("a", 0), ("a", 1)]) == ["a", "a", "a (2)", "a (2)"]


LAYOUTS = {
    "hsdp": HSDP,
    "fsdp": Layout(dp_shard=4, zero=3),
    "tp": Layout(tp=4),
    "pp": Layout(pp=4, microbatches=4),
    "all": ALL_AXES,
}


def spread(record, hosts):
    """The record as if its devices were on these hosts, a number each, and had sent what they then send."""
    layout = record.manifest.experiment.layout
    rows = [
        replace(row, crossing_bytes=round(across(row, layout, hosts)) if row.bytes > 8 * row.calls else 0)
        for row in record.ledger.rows
    ]
    manifest = replace(record.manifest, hosts=[str(host) for host in hosts])
    return replace(record, manifest=manifest, ledger=Ledger(rows=rows))


def across(row, layout, hosts):
    """From the groups of a row's axis, by what the sides count."""
    found = 0.0
    for device in range(layout.devices):
        if layout.stage_of(device) != row.stage:
            continue
        group = [other for other in range(layout.devices) if alike(device, other, row.axis, layout)]
        if row.kind == "permute":
            step = -1 if "gradients" in row.purpose else 1
            if row.purpose == "tied gradients" and row.stage == layout.pp - 1:
                step = 1
            group = [device, group[(group.index(device) + step) % len(group)]]
        found += sent_across(row.kind, row.bytes, group, device, hosts)
    return found


def alike(one, other, axis, layout):
    """Whether two devices differ along this axis alone."""
    inside = layout.devices
    for name, degree in layout.axes.items():
        inside //= degree
        if name != axis and one // inside % degree != other // inside % degree:
            return False
    return True


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("engine", ["torch-manual", "jax-manual"])
def test_a_record_is_held_to_where_its_devices_are(tmp_path, tiny, engine, name):
    layout = LAYOUTS[name]
    big = {"model": {"n_layer": 4, "n_head": 4, "n_embd": 32}, "train": {"batch_size": 8}}
    record = make_record(tmp_path / "run", replace(edited(tiny, big), layout=layout), engine=engine)
    devices = range(layout.devices)
    right = spread(record, [host_of(device, layout, 2) for device in devices])
    assert strategy_of(right).objections == []
    assert strategy_of(right).found("what crosses hosts") == "the closed form of 2 hosts"
    # A ledger of one host; and ranks as SLURM deals them out with --distribution=cyclic, which a ring of all
    # devices does not notice.
    dealt = [] if name in ("fsdp", "tp") else [[device % 2 for device in devices]]
    for hosts in ([0] * layout.devices, *dealt):
        wrong = replace(spread(record, hosts), manifest=right.manifest)
        (objection,) = strategy_of(wrong).objections
        assert objection.startswith("what crosses hosts = the closed form of 2 hosts was asked for, and ")
        assert "across hosts instead of" in objection
    assert strategy_of(record).found("what crosses hosts") == ""  # one host


def test_the_picture_and_the_table(tmp_path, tiny):
    layout = Layout(dp_replicate=2, tp=2)
    table = host_table(layout, ["a", "a", "b", "b"])
    assert [(row.head.text, [cell.text for cell in row.cells]) for row in table.rows] == [
        ("a", ["device 0: dp_replicate 0, tp 0", "device 1: dp_replicate 0, tp 1"]),
        ("b", ["device 2: dp_replicate 1, tp 0", "device 3: dp_replicate 1, tp 1"]),
    ]
    assert table.below == "dp_replicate crosses hosts, tp stays inside one."
    assert crossing_words(Layout(tp=2), 2).startswith("tp crosses hosts; with tp every layer waits")
    record = spread(make_record(tmp_path / "run", replace(tiny, layout=layout)), [0, 0, 1, 1])
    experiment = with_remat_resolved("torch-manual", record.manifest.experiment)
    lines = line_up("torch-manual", experiment, record.ledger.rows)
    found = crossings("torch-manual", experiment, lines, record.ledger.rows, 2)
    rows = crossing_table({"torch-manual": found}).rows
    cells = {row.head.text: [cell.text for cell in row.cells] for row in rows}
    assert cells["tp"] == ["\N{EN DASH}", "\N{EN DASH}"]
    assert cells["dp_replicate"][1] == "="
