"""`shardpair ledger --chip`: tables of made-up programs, and refusals before a process starts."""

import importlib.util

import msgspec
import pytest

from compare.cli import main
from compare.commands.ledger import chips
from compare.contract.chips import ChipProgram, ChipRequest
from compare.contract.communication import Communication
from compare.contract.ledger import Ledger
from compare.execute.launch import EnvironmentMissing
from compare.setup.chips import GPUS, chip_of, devices_of
from compare.spec.experiment import ExperimentError

ROW = Communication(
    kind="all_gather", axis="dp_shard", calls=28, bytes=12_600_000, wire_bytes=0, purpose="parameters"
)
ROWS = [
    msgspec.structs.replace(
        ROW, dtype="bf16", is_async=True, overlapped=("dot_general", "dot_general", "add"), cycles=1234
    ),
    msgspec.structs.replace(ROW, dtype="f32, bf16", calls=2, bytes=524_000, algorithm="RingEmitter"),
    msgspec.structs.replace(ROW, kind="all_reduce", purpose="loss", dtype="f32", calls=2, bytes=16),
]
PROGRAM = ChipProgram(
    ledger=Ledger(rows=ROWS),
    state_bytes=5_000_000,
    peak_bytes=62_400_000,
    compile_s=8.25,
    is_cached=False,
    device="TPU v5 lite",
    versions={},
)
FLAGS = ("ledger", "demo", "--preset", "fsdp", "--precision.dtype", "bfloat16", "--quiet")


@pytest.fixture
def asked(monkeypatch):
    """The requests of the command. `answers` are by chip: a program, or an error to raise."""
    requests: list[ChipRequest] = []
    answers: dict[str, object] = {}

    def query(side, python, question, **_):
        requests.append(msgspec.json.decode(question[1], type=ChipRequest))
        answer = answers.get(requests[-1].chip.name, PROGRAM)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(chips, "query", query)
    requests_and_answers = requests, answers
    return requests_and_answers


def test_column_of_a_chip_is_overlapped_the_textbook(asked, capsys):
    assert main([*FLAGS, "--chip", "v5e:2x4", "--chip", "cpu", "--engines", "jax-manual"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "axis role textbook torch-manual v5e:2x4 cpu" in shown
    assert "12.6 MB bf16 in 28 + 524 kB bf16, f32 in 2" in shown
    assert "peak memory - - 62.4 MB 62.4 MB" in shown
    assert "all_gather dp_shard bf16 yes 56 dot_general, 28 add - 28 12.6 MB 1,234" in shown
    assert "all_gather dp_shard bf16, f32 no - RingEmitter 2 524 kB -" in shown
    assert "without the CPU's, 28 of 30 calls are asynchronous, and 28 are overlapped" in shown
    requests, _ = asked
    assert [(r.engine, r.chip.name, r.experiment.layout.dp_shard) for r in requests] == [
        ("jax-manual", "v5e:2x4", 8),  # as many devices as the chip has
        ("jax-manual", "cpu", 8),
    ]
    assert {r.experiment.data.source for r in requests} == {"synthetic"}


def test_dry_run_compiles_nothing(asked, capsys):
    assert main([*FLAGS, "--chip", "h100x8", "--engines", "jax-manual", "jax-compiler", "--dry_run"]) == 0
    *names, last = capsys.readouterr().out.splitlines()
    assert names == ["jax-manual on h100x8", "jax-compiler on h100x8"]
    assert last == "dry run: 2 programs; nothing was compiled"
    assert asked[0] == []


def test_instruction_that_is_not_understood_is_counted(asked, capsys):
    _, answers = asked
    broken = Ledger(rows=ROWS, problems=["a chain that never starts, at mine.py:3"] * 2)
    answers["h100x8"] = msgspec.structs.replace(PROGRAM, ledger=broken)
    flags = [*FLAGS, "--chip", "h100x8", "--engines", "jax-compiler"]
    assert main(flags) == 0
    shown = capsys.readouterr().out
    assert "2 instructions not understood" in shown
    assert "a chain that never starts, at mine.py:3" in shown
    assert main([*flags, "--fail_on_unexpected"]) == 1


def test_missing_compiler_leaves_a_chip_out(asked, capsys):
    _, answers = asked
    why = "jaxpar: --chip v5e:2x4: libtpu is not installed: pip install 'shardpair[tpu]'"
    answers["v5e:2x4"] = EnvironmentMissing(why)
    engine = ("--engines", "jax-manual")
    assert main([*FLAGS, "--chip", "v5e:2x4", "--chip", "cpu", *engine]) == 0
    assert f"left out: jax-manual on v5e:2x4: {why}" in capsys.readouterr().out
    assert main([*FLAGS, "--chip", "v5e:2x4", *engine]) == 3
    assert capsys.readouterr().err.strip().endswith(why)


def test_rejected_program_is_missing(asked, capsys):
    _, answers = asked
    answers["v5e:2x4"] = ExperimentError("--chip v5e:2x4: it does not fit")
    assert main([*FLAGS, "--chip", "v5e:2x4", "--chip", "cpu", "--engines", "jax-manual"]) == 1
    assert "MISSING: jax-manual on v5e:2x4" in capsys.readouterr().out
    answers["v5e:2x4"] = EnvironmentMissing("jaxpar: Segmentation fault")
    assert main([*FLAGS, "--chip", "v5e:2x4", "--chip", "cpu", "--engines", "jax-manual"]) == 1


REFUSED = {
    "v9z:2x4": "--chip v9z:2x4: no such chip: give cpu, a TPU such as v5e:2x4",
    "h100": "--chip h100: no such chip",
    "v5e:2x2x2": "--chip v5e:2x2x2: a v5e has 2 dims, such as v5e:2x2",
    "h100x12": "--chip h100x12: give 1 to 8 GPUs, or a multiple of 8",
    "v5e:2x4 --chip h100x4": "v5e:2x4 has 8 devices and h100x4 has 4 devices: give chips with equal numbers",
    "v5e:2x4 --chip v5e:2x4": "give each chip once",
    "v5e:2x4 --devices 4": "--chip v5e:2x4 has 8 devices, and the layout 4",
    "v5e:2x4 --engines torch-manual": "--engines torch-manual: --chip takes jax-compiler",
    "v5e:2x4 --precision.dtype float64": "a TPU has no float64: add --precision.dtype bfloat16",
    "v5e:2x4 --layout.xla tuned": "layout.xla has an effect only for JAX with --platform gpu",
    "h100x8 --chip v5e:2x4 --layout.xla tuned": "sets options of XLA's GPU compiler: leave it out",
    "v5e:2x4 --optimizer.beta2 0.9 --optimizer.name sgd": "optimizer.beta2",
    "v5e:2x4 --run_dir x": "--chip compiles programs and trains nothing: leave out --run_dir",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_impossible_chip_is_refused(flags, asked, capsys):
    assert main([*FLAGS, "--chip", *flags.split()]) == 2
    assert REFUSED[flags] in capsys.readouterr().err
    assert asked[0] == []


def test_chips_have_devices():
    names = {
        "cpu": 0,
        "v5e:2x4": 8,
        "v5e:16x16": 256,
        "v5p:2x2x2": 8,
        "h100x1": 1,
        "h100x4": 4,
        "b200x64": 64,
    }
    assert {name: devices_of(chip_of(name)) for name in names} == names
    assert chip_of("h200x16").topology == "1x2x8"
    assert all("cuda_compute_capability" in target for target in GPUS.values())


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="the extra `tpu` is not installed")
def test_tpu_compiler_compiles_for_absent_chips(tmp_path, capsys):
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 128, "block_size": 128}
    flags = [word for name, size in sizes.items() for word in (f"--model.{name}", str(size))]
    chip = ("--chip", "v5e:2x2", "--engines", "jax-manual", "--cache_dir", str(tmp_path), "--json")
    assert main([*FLAGS, *flags, *chip]) == 0
    (found,) = msgspec.json.decode(capsys.readouterr().out)["values"]["programs"]
    assert found["program"]["ledger"]["problems"] == []
    kinds = {row["kind"] for row in found["program"]["ledger"]["rows"]}
    assert {"all_gather", "reduce_scatter"} <= kinds
