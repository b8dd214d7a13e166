"""`shardpair collectives`: its tables, its ranks, and both sides run on two hosts."""

import json

import pytest

from compare.commands.collectives import findings_of_times, implementations_on, ranks_on, sizes_between
from compare.execute.launchers import Hosts
from compare.show.markdown import markdown
from compare.side.collective_bench import KINDS, CollectiveCase, CollectiveTimes, make_row


def times_of(*, wrong: int = 0) -> CollectiveTimes:
    """Rows of every way, collective and size, on two and four ranks; the last has wrong elements."""
    rows = [
        make_row(name, CollectiveCase(kind, size), ranks=ranks, seconds=1e-6 * size, wrong=0)
        for ranks in (2, 4)
        for kind in KINDS
        for size in sizes_between(1024, 4096)
        for name in implementations_on("cpu")
    ]
    rows.append(make_row("ours", CollectiveCase("permute", 2**22), ranks=4, seconds=1.0, wrong=wrong))
    return CollectiveTimes(rows=rows, device_kind="cpu", versions={}, threads="1 per rank", hosts=["box"])


def test_collectives_tables():
    found = findings_of_times([times_of()], missing={}, busy_cores=0.0)
    assert found.passed
    assert len(found.tables) == 2 * len(KINDS)
    page = markdown(found)
    assert "| 1,024 | 256 | gloo | 1,024.0 | 0.001 | 0.001 | 0 |" in page  # all_reduce on two ranks
    assert "warnings" not in page


def test_collectives_wrong_element_fails():
    found = findings_of_times([times_of(wrong=3)], missing={}, busy_cores=0.0)
    assert (found.passed, found.sentence) == (False, "wrong results in ours permute")
    assert "**3**" in markdown(found)


def test_collectives_failed_side_and_load():
    found = findings_of_times([times_of()], missing={"jaxpar-2": "did not finish: why"}, busy_cores=99.0)
    assert not found.passed
    assert "other processes used 99.0 cores" in found.warnings[0]


@pytest.mark.parametrize(
    ("hosts", "ranks"),
    [
        (Hosts(), (2, 4, 6)),
        (Hosts(count=4), (4,)),
        (Hosts(count=2, launcher="torchrun", slots={"head": 2, "other": 2}), (2, 4)),
        (Hosts(count=5), (5,)),
    ],
)
def test_collectives_ranks(hosts, ranks):
    assert ranks_on(hosts, "cpu") == ranks


def test_collectives_sizes():
    assert sizes_between(1024, 70_000) == [1024, 4096, 16384, 65536]


def test_collectives_on_two_hosts(shardpair):
    """Two hosts on the loopback, two ranks or devices on each."""
    done = shardpair(
        *("collectives", "--hosts", "2", "--ranks", "4", "--max_size", "1K", "--anyway"),
        *("--run_dir", "out", "--json"),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["values"]
    assert len(found["rows"]) == 3 * len(KINDS)
    assert {row["implementation"] for row in found["rows"]} == {"gloo", "ours", "xla"}
    assert all(row["wrong"] == 0 and row["time_us"] > 0 for row in found["rows"])
    for side in found["sides"]:
        first, second = side["hosts"][0], side["hosts"][-1]
        assert side["hosts"] == [first, first, second, second]
        assert second == f"{first} (2)"
    assert (shardpair.folder / "out" / "jaxpar-4" / "collectives.json").is_file()
