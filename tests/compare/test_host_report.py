"""What `shardpair doctor` says of several hosts that do not fit each other."""

import pytest
from msgspec.structs import replace

from compare.cli import main
from compare.execute.host_report import HostReport, SideReport, objections, report

JAX = SideReport(versions={"jax": "0.10.2"}, cpu_devices="some", gpus=[])
ONE = HostReport(
    host="one",
    cores=4,
    gpus=0,
    interface="eth0",
    address="10.0.0.1",
    sees_folder=True,
    clock_s=100.0,
    sides={"jaxpar": JAX},
)
OTHER = {
    "nothing": ({}, []),
    "an hour ahead": ({"clock_s": 3700.0}, ["other: its clock is off by 3,599 s or more"]),
    "behind": ({"clock_s": 90.0}, ["other: its clock is off by 10 s or more"]),
    "another folder": ({"sees_folder": False}, ["other: it does not see the folder of the results"]),
    "its own loopback": ({"interface": "lo"}, ["other: no interface reaches one: 10.0.0.1"]),
    "fewer GPUs": ({"gpus": 1}, ["other: 1 gpus, one has 0"]),
    "another version": (
        {"sides": {"jaxpar": replace(JAX, versions={"jax": "0.11.2", "flax": "1"})}},
        ["other: flax 1, one has none", "other: jax 0.11.2, one has 0.10.2"],
    ),
    "no jax": ({"sides": {"jaxpar": "jaxpar: No module named jax"}}, ["other: jaxpar: No module named jax"]),
}


@pytest.mark.parametrize(("fields", "lines"), OTHER.values(), ids=OTHER)
def test_a_host_that_does_not_fit_is_named(fields, lines):
    other = replace(ONE, host="other", **fields)
    assert objections([ONE, other], began_s=100.0, ended_s=101.0) == lines


def test_a_host_reports_itself(tmp_path):
    found = report(tmp_path / "none", "localhost", {"jaxpar": "no-such-python"})
    assert (found.sees_folder, found.address) == (False, "127.0.0.1")
    assert found.sides == {"jaxpar": "jaxpar: no-such-python: no such program"}
    assert objections([found], began_s=found.clock_s, ended_s=found.clock_s)


def test_hosts_are_asked_through_slurm_alone(capsys):
    assert main(["doctor", "--hosts", "2"]) == 2
    assert "give --launcher slurm" in capsys.readouterr().err
