"""Differences between the hosts of a run, each reported with both values."""

import pytest

from compare.side import host_facts
from compare.side.host_facts import HostFacts, agree, host_names
from compare.spec.experiment import ExperimentError


def facts(host: str, *, numpy="2.0", sha256="a" * 64) -> HostFacts:
    return HostFacts(host=host, versions={"numpy": numpy}, corpus_sha256=sha256)


ALIKE = [facts("host0"), facts("host0", sha256=""), facts("host1"), facts("host1", sha256="")]


def test_equal_hosts_agree():
    agree(ALIKE)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (facts("host1", numpy="2.1"), r"host1 has numpy 2\.1, and host0 2\.0: install the same"),
        (facts("host1", sha256="b" * 64), "host1 reads other data than host0: SHA-256 of the tokens bb"),
    ],
    ids=["version", "data"],
)
def test_different_hosts_are_named(other, message):
    with pytest.raises(ExperimentError, match=message):
        agree([*ALIKE, other])


def test_changed_source_is_found(tmp_path, monkeypatch):
    package = tmp_path / "side"
    package.mkdir()
    file = package / "__init__.py"
    file.write_text("rate = 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = host_facts.facts_here("side", ["numpy"])
    file.write_text("rate = 1.5\n")
    with pytest.raises(ExperimentError, match=r"has shardpair [0-9a-f]{12}, and .* [0-9a-f]{12}: install"):
        agree([before, host_facts.facts_here("side", ["numpy"])])


def test_loopback_hosts_get_numbers():
    assert host_names([("a", 0), ("b", 0), ("a", 1)]) == ["a", "b", "a"]
    assert host_names([("a", 0), ("a", 1), ("a", 0), ("a", 1)]) == ["a", "a", "a (2)", "a (2)"]
