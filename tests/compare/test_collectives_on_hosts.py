"""`shardpair collectives` on several hosts: both sides on the loopback, and how many ranks there may be."""

import json

from compare import cli
from compare.execute import hosts


def test_collectives_across_hosts_are_timed_by_both_sides_and_name_the_hosts(shardpair):
    """Two hosts on the loopback, two ranks or devices on each; the last one's result is falsified."""
    done = shardpair(
        *("collectives", "--hosts", "2", "--ranks", "4", "--max_size", "1K", "--row_s", "0.001", "--anyway"),
        *("--kinds", "all_reduce", "permute", "--fault", "permute", "--run_dir", "out", "--json"),
    )
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["failures"] == {}
    wrong = {(row["implementation"], row["kind"]): row["wrong"] for row in found["rows"]}
    kinds = ("all_reduce", "permute")
    assert wrong == {(way, kind): kind == "permute" for way in ("gloo", "ours", "xla") for kind in kinds}
    for side in found["sides"].values():
        first, second = side["hosts"][0], side["hosts"][-1]
        assert side["hosts"] == [first, first, second, second]
        assert second == f"{first} (2)"
    assert "all_reduce on 4 ranks over 2 hosts" in (shardpair.folder / "out/collectives.html").read_text()


def test_ranks_are_those_that_hosts_divide_and_have_slots_for(tmp_path, monkeypatch):
    monkeypatch.setattr(hosts.socket, "gethostname", lambda: "head")
    (tmp_path / "hostfile").write_text("head slots=2\nother slots=2\n")
    asked, _ = cli.parse(["collectives", "--hosts", "4"])
    assert asked.order().ranks == (4,)
    slots = ["--launcher", "torchrun", "--hostfile", str(tmp_path / "hostfile")]
    asked, _ = cli.parse(["collectives", *slots])
    assert asked.order().ranks == (2, 4)
    again, _ = cli.parse(asked.command_line(asked.order()).split()[1:])
    assert again.order() == asked.order()
