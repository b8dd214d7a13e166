"""A real bench: two engines, one round, steps in windows."""

import json

import pytest

from compare.spec.experiment import to_toml


def test_bench_of_two_engines(shardpair, tiny):
    (shardpair.folder / "tiny.toml").write_text(to_toml(tiny))
    asked = ("bench", "tiny.toml", "--engines", "torch-manual", "jax-manual", "--presets", "ddp")
    rounds = ("--devices", "2", "--rounds", "1", "--window", "2", "--windows", "2", "--anyway", "--json")
    done = shardpair(*asked, *rounds)
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)["values"]
    result = values["outcome"]
    assert result["failures"] == {}
    assert result["left_out"] == {}
    (rows,) = values["rows"].values()
    assert [row["label"] for row in rows] == ["torch-manual", "jax-manual"]
    torch, jax = (kept["1"] for kept in result["kept"].values())
    assert torch["curves"]["loss"] == pytest.approx(
        jax["curves"]["loss"], rel=1e-10
    )  # after steps in windows and alone
    for one in (torch, jax):
        assert [window["steps"] for window in one["windows"]] == [2, 2]
        assert len(one["single_ms"]) == next(iter(result["cases"].values()))["request"]["timing"]["single"]
        assert min(window["wall_s"] for window in one["windows"]) > 0
        assert min(window["cpu_s"] for window in one["windows"]) > 0
        assert one["first_step_s"] > 0
    assert jax["compile_s"] > 0
    assert all(row["flops_per_s"] > 0 for row in rows)
    (folder,) = (shardpair.folder / "runs").iterdir()
    assert (folder / "bench.html").is_file()
