"""`shardpair convert`: from and to what others use; nothing half-written, nothing executed."""

import errno
import json
import os
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from compare.checkpoint.reader import CheckpointReader
from compare.cli import main
from compare.commands.convert import FORMATS
from compare.formats.huggingface import CONFIG, INDEX, WEIGHTS_FILE, read_gpt2, write_gpt2
from compare.side.run_lock import lock_folder
from compare.spec.experiment import Experiment, ExperimentError, Layout, Model, Precision, edited
from compare.system.tensors import RecordError
from tests.support.checkpoints import assert_is_random, random_state, write_random
from tests.support.rows import short

EXPERIMENT = Experiment(
    model=Model(n_layer=2, n_head=2, n_embd=6, block_size=5, vocab_size=7, bias=True, activation="gelu_tanh"),
    precision=Precision(dtype="float64"),
)


@pytest.fixture
def given(tmp_path: Path) -> Path:
    return write_random(tmp_path / "given", EXPERIMENT)


def weights(experiment: Experiment = EXPERIMENT) -> dict[str, np.ndarray]:
    return {name: array for (group, name), array in random_state(experiment).items() if group == "weights"}


def test_convert_run_to_weights_and_checkpoint(given, tmp_path, capsys):
    assert main(["convert", str(tmp_path / "given"), str(tmp_path / "w.safetensors")]) == 0
    found = load_file(tmp_path / "w.safetensors")
    for name, array in weights().items():
        np.testing.assert_array_equal(found[name], array)
    os.renames(tmp_path / "given", tmp_path / "run" / "torch-manual")  # a run of one engine
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "copy"), "--json"]) == 0
    assert_is_random(tmp_path / "copy", EXPERIMENT)
    printed = capsys.readouterr().out.splitlines()
    said = "weights, of torch-manual, at step 7, after 5 updates: 2 layers of width 6, dropout 0.0, float64"
    assert f"w.safetensors: {said}, data of stdlib" in printed[0]
    assert json.loads("".join(printed[1:]))["values"]["format"] == "checkpoint"


def test_hugging_faces_gpt2_there_and_back(given, tmp_path):
    assert main(["convert", str(given), str(tmp_path / "gpt2"), "--to", "huggingface"]) == 0
    assert (
        json.loads((tmp_path / "gpt2" / CONFIG).read_text())["eos_token_id"] is None
    )  # GPT-2 has another vocabulary
    tensors = load_file(tmp_path / "gpt2" / WEIGHTS_FILE)
    # Its Conv1D keeps (in, out), nn.Linear (out, in).
    qkv = weights()["blocks.1.attention.qkv.weight"].reshape(6, 18)
    np.testing.assert_array_equal(tensors["transformer.h.1.attn.c_attn.weight"], qkv)
    out = weights()["blocks.0.attention.out.weight"].reshape(6, 6)
    np.testing.assert_array_equal(tensors["transformer.h.0.attn.c_proj.weight"], out)
    model, found = read_gpt2(tmp_path / "gpt2")
    assert model == EXPERIMENT.model
    for name, array in weights().items():
        np.testing.assert_array_equal(found[name], array)  # float64 stays float64
    assert main(["convert", str(tmp_path / "gpt2"), str(tmp_path / "back")]) == 0
    reader = CheckpointReader(tmp_path / "back")
    assert (reader.description.updates, reader.description.experiment.model) == (0, EXPERIMENT.model)
    assert reader.description.experiment.layout == Layout()  # the default
    assert not reader.read("v", "embedding.token").any()


SPOILT = (
    ({"activation_function": "relu"}, 'activation_function = "relu"; possible: "gelu_new" or'),
    ({"model_type": "llama"}, 'model_type = "llama"; possible: "gpt2"'),
    ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = true; possible"),
    ({"n_inner": 7}, "n_inner = 7; possible: null or 24"),
    ({"tie_word_embeddings": False}, "tie_word_embeddings = false"),
    ({"n_layer": 3}, "tensors and the model"),
    ({"embd_pdrop": 0.2}, "embd_pdrop = 0.2; possible: 0.0"),
)


@pytest.fixture
def gpt2(tmp_path) -> Path:
    """A folder in Hugging Face's format."""
    write_gpt2(tmp_path / "gpt2", EXPERIMENT.model, weights())
    return tmp_path / "gpt2"


@pytest.mark.parametrize(("spoil", "words"), SPOILT, ids=map(short, SPOILT))
def test_other_gpt2_models_are_rejected(gpt2, spoil, words):
    config = json.loads((gpt2 / CONFIG).read_text())
    (gpt2 / CONFIG).write_text(json.dumps(config | spoil))
    with pytest.raises(ExperimentError) as refused:
        read_gpt2(gpt2)
    assert words in str(refused.value)


@pytest.mark.parametrize(("given", "dropout"), [(0.25, 0.25), (None, 0.1)], ids=["given", "default"])
def test_dropout_of_gpt2(gpt2, given, dropout):
    config = json.loads((gpt2 / CONFIG).read_text())
    config |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), given)
    (gpt2 / CONFIG).write_text(json.dumps({name: x for name, x in config.items() if x is not None}))
    assert read_gpt2(gpt2)[0].dropout == dropout


def test_masks_are_skipped_other_tensors_rejected(gpt2, tmp_path, capsys):
    path = gpt2 / WEIGHTS_FILE
    tensors = load_file(path)
    save_file({**tensors, "transformer.h.0.attn.bias": np.zeros((1, 1, 5, 5))}, path)
    read_gpt2(gpt2)
    save_file({**tensors, "lm_head.weight": tensors["transformer.wte.weight"] + 1}, path)
    with pytest.raises(ExperimentError, match="is not tied to the embedding"):
        read_gpt2(gpt2)
    spoilt = tensors["transformer.ln_f.weight"].copy()
    spoilt[0] = np.nan
    save_file({**tensors, "transformer.ln_f.weight": spoilt}, path)
    assert main(["convert", str(gpt2), str(tmp_path / "x")]) == 2
    assert f"{gpt2}: weights/norm.scale has values that are NaN" in capsys.readouterr().err


def split(gpt2: Path) -> dict[str, str]:
    """Move the weights to two files with an index, as transformers does. Returns the file of each."""
    tensors = load_file(gpt2 / WEIGHTS_FILE)
    (gpt2 / WEIGHTS_FILE).unlink()
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for number, file in enumerate(files):
        save_file({name: tensors[name] for name in sorted(tensors)[number::2]}, gpt2 / file)
    file_of = {name: files[number % 2] for number, name in enumerate(sorted(tensors))}
    (gpt2 / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": file_of}))
    return file_of


def test_weights_in_several_files(gpt2):
    split(gpt2)
    model, found = read_gpt2(gpt2)
    assert model == EXPERIMENT.model
    for name, array in weights().items():
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize(
    "place", ["../secret.safetensors", "/secret.safetensors", "nowhere.safetensors", ".."]
)
def test_index_stays_in_its_folder(gpt2, tmp_path, place):
    file_of = split(gpt2)
    name = "transformer.wte.weight"
    save_file({name: np.zeros((7, 6))}, tmp_path / "secret.safetensors")
    place = place.replace("/secret", f"{tmp_path}/secret") if place.startswith("/") else place
    (gpt2 / INDEX).write_text(json.dumps({"weight_map": file_of | {name: place}}))
    with pytest.raises(RecordError, match=r"is not the name of a file in this folder|does not exist"):
        read_gpt2(gpt2)


def test_index_with_tensors_that_files_lack(gpt2):
    file_of = split(gpt2)
    (gpt2 / INDEX).write_text(json.dumps({"weight_map": file_of | {"x": file_of["transformer.wte.weight"]}}))
    with pytest.raises(RecordError, match=f"lacks x of {INDEX}: copy it again"):
        read_gpt2(gpt2)
    (gpt2 / INDEX).write_text("[]")
    with pytest.raises(RecordError, match="Expected `object`, got `array`"):
        read_gpt2(gpt2)


UNREADABLE = {
    "hf/pytorch_model.bin": "hf has pytorch_model.bin and no model.safetensors: load it with transformers",
    "hf/pytorch_model-00001-of-00002.bin": "hf has pytorch_model-00001-of-00002.bin and no model.safetensors",
    "hf/tf_model.h5": "hf has TensorFlow's tf_model.h5 and no model.safetensors",
    "hf/flax_model.msgpack": "hf has Flax's flax_model.msgpack and no model.safetensors",
    "hf/model.safetensors": "hf has model.safetensors and no config.json: copy the whole folder",
    "hf/model-00001-of-00002.safetensors": "but config.json or model.safetensors.index.json is missing",
    "hf/config.json": "hf has config.json and no model.safetensors: copy the whole folder",
    "lora/adapter_config.json": "lora is an adapter, such as LoRA: save the model after merge_and_unload()",
    "models--gpt2/snapshots/1f2/config.json": "give models--gpt2/snapshots/1f2",
    "hub/models--gpt2/snapshots/1f2/config.json": "such as hub/models--gpt2/snapshots/1f2",
    "dcp/.metadata": "dcp is a folder of torch.distributed.checkpoint: `python -m torch.distributed",
    "manager/10/_CHECKPOINT_METADATA": "several orbax checkpoints: give one, such as manager/10",
    "out/ckpt.pt": "a file of torch.save: give the file, such as out/ckpt.pt",
    "empty/nothing": "empty: no checkpoint found: give one",
}


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("file", UNREADABLE)
def test_unreadable_folder_is_explained(tmp_path, monkeypatch, capsys, file):
    monkeypatch.chdir(tmp_path)
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).touch()
    for line in (["convert", file.split("/")[0], "x"], ["run", "--resume", file.split("/")[0]]):
        assert main(line) == 2
        assert UNREADABLE[file] in capsys.readouterr().err


@pytest.mark.usefixtures("no_process")
def test_unreadable_file_is_explained(gpt2, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_file(weights(), "alone.safetensors")
    with zipfile.ZipFile("ckpt", "w") as archive:
        archive.writestr("ckpt/data.pkl", b"")
    for source, words in (
        ("gpt2/model.safetensors", "is one file of a checkpoint: give the folder gpt2"),
        ("alone.safetensors", "has weights, but not the sizes of their model: give it to --init_from"),
        ("ckpt", "ckpt is a file of torch.save: rename it to end in .pt"),
    ):
        assert main(["convert", source, "x"]) == 2
        assert words in capsys.readouterr().err


WRAPPED = (
    (r"^transformer\.", "_orig_mod.module.transformer."),
    (r"^transformer\.", "module._orig_mod._orig_mod."),
    (r"^transformer\.", "model.transformer."),  # Lightning's
    (r"h\.(\d)\.", r"_fsdp_wrapped_module.h.\1._orig_mod._checkpoint_wrapped_module."),
)


@pytest.mark.parametrize(("pattern", "wrapped"), WRAPPED, ids=map(short, WRAPPED))
def test_parts_of_wrappers_are_removed(gpt2, pattern, wrapped):
    tensors = load_file(gpt2 / WEIGHTS_FILE)
    save_file({re.sub(pattern, wrapped, name): array for name, array in tensors.items()}, gpt2 / WEIGHTS_FILE)
    found = read_gpt2(gpt2)[1]
    for name, array in weights().items():
        np.testing.assert_array_equal(found[name], array)


def test_unknown_prefix_and_equal_names(gpt2):
    tensors = load_file(gpt2 / WEIGHTS_FILE)
    save_file({f"net.{name}": array for name, array in tensors.items()}, gpt2 / WEIGHTS_FILE)
    with pytest.raises(ExperimentError, match=r"unknown prefix net\.transformer\. of net\.transformer\.wte"):
        read_gpt2(gpt2)
    save_file({**tensors, "h.0._orig_mod.ln_1.bias": np.zeros(6)}, gpt2 / WEIGHTS_FILE)
    with pytest.raises(ExperimentError, match=r"has h\.0\.ln_1\.bias twice, with and without a prefix"):
        read_gpt2(gpt2)


@pytest.mark.parametrize(("stored", "dtype"), [("U16", "BF16"), ("U8", "F8_E4M3")])
def test_dtypes_that_numpy_lacks(gpt2, tmp_path, capsys, stored, dtype):
    """bfloat16 is the upper half of a float32; 8-bit floats are rejected."""
    path = gpt2 / WEIGHTS_FILE
    tensors = load_file(path)
    halves = {
        n: (np.ascontiguousarray(a, np.float32).view("<u4") >> 16).astype("<u2") for n, a in tensors.items()
    }
    save_file({n: a.astype(f"u{int(stored[1:]) // 8}") for n, a in halves.items()}, path)
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = content[8:end].replace(f'"{stored}"'.encode(), f'"{dtype}"'.encode())
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
    if dtype == "BF16":
        token = read_gpt2(gpt2)[1]["embedding.token"]
        assert token.dtype == np.float32
        np.testing.assert_array_equal(token.view("<u4") >> 16, halves["transformer.wte.weight"])
        np.testing.assert_allclose(token, tensors["transformer.wte.weight"], rtol=2**-7)
    else:
        assert main(["convert", str(gpt2), str(tmp_path / "x")]) == 2
        assert "is F8_E4M3, which NumPy lacks: write it as float32" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ("given", "given", "exists already"),
        ("given", "no/x", "is missing: create it"),
        ("nowhere", "x", "nowhere does not exist: give a file or a folder"),
        ("nowhere.pt", "x", "does not exist"),
    ],
)
def test_convert_rejects_bad_names(given, tmp_path, monkeypatch, capsys, source, target, words):
    assert (FORMATS[".pt"], FORMATS[".safetensors"]) == ("nanogpt", "weights")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert main(["convert", source, target]) == 2
    assert words in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


PLAIN = edited(EXPERIMENT, {"model": {"activation": "gelu"}})
NOT_IN_NANOGPT = (
    ({"model": {"activation": "gelu_tanh"}}, "model.activation = gelu_tanh, and nanoGPT has only gelu"),
    ({"model": {"activation": "relu_squared"}}, "model.activation = relu_squared: GPT-2 has no such option"),
    ({"model": {"position": "rope"}}, "model.position = rope: GPT-2 has no such option"),
    ({"model": {"norm": "rmsnorm"}}, "model.norm = rmsnorm: GPT-2 has no such option"),
    ({"model": {"n_kv_head": 1}}, "model.n_kv_head = 1: GPT-2 has no such option"),
    ({"model": {"norm_eps": 1e-3}}, "model.norm_eps = 0.001, and nanoGPT has only 1e-05"),
    ({"optimizer": {"decay": "all"}}, "optimizer.decay = all, and nanoGPT has only matrices"),
    ({"optimizer": {"name": "sgd"}}, "optimizer.name = sgd, and nanoGPT has only adamw"),
)


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(("changes", "words"), NOT_IN_NANOGPT, ids=map(short, NOT_IN_NANOGPT))
def test_formats_reject_other_models(tmp_path, capsys, changes, words):
    """The error names the source, and not a temporary folder."""
    plain = edited(PLAIN, {"model": {"n_embd": 8}})  # rope needs an even width of a head
    given = write_random(tmp_path, edited(plain, changes))
    before = sorted(tmp_path.iterdir())
    formats = ["nanogpt", "huggingface"] if "GPT-2 has no" in words else ["nanogpt"]
    for to in formats:
        assert main(["convert", str(given), str(tmp_path / "back"), "--to", to]) == 2
        assert f"error: {given}: {words}" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


FULL = {
    "checkpoint": "shutil.copy",
    "weights": "compare.system.disk.Path.write_bytes",
    "huggingface": "compare.system.disk.Path.write_bytes",
    "nanogpt": "compare.execute.query.output_of",
    "orbax": "compare.execute.query.output_of",
}
"""Format of a target -> the function that writes it."""


@pytest.mark.parametrize("to", FULL)
def test_full_disk_names_the_target(tmp_path, monkeypatch, capsys, to):
    given = write_random(tmp_path, PLAIN)
    before = sorted(tmp_path.iterdir())

    def write(*arguments: object, **options: object) -> tuple[int, str]:
        if FULL[to].endswith("output_of"):
            return 1, f"ValueError: a write failed: {os.strerror(errno.ENOSPC)} [28]\nEvent loop is closed"
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/a/temporary/file")

    monkeypatch.setattr(FULL[to], write)
    target = tmp_path / "target"
    assert main(["convert", str(given), str(target), "--to", to]) == 1
    full = f"{target}: No space left on device: make room, and run again"
    assert capsys.readouterr().err == f"shardpair: error: {full}\n"
    assert sorted(tmp_path.iterdir()) == before


def test_killed_conversion_leaves_a_folder(given, tmp_path, monkeypatch, capsys):
    """The next conversion to the same target removes it. A second one at the same time is rejected."""
    left = tmp_path / ".target.shardpair-convert"
    (left / "tmp1" / "read").mkdir(parents=True)
    before = {*tmp_path.iterdir()} - {left}
    line = ["convert", str(given), str(tmp_path / "target")]
    with lock_folder(left):
        assert main(line) == 2
    assert "is in use by another run" in capsys.readouterr().err
    assert (left / "tmp1").is_dir()
    assert main(line) == 0
    assert {*tmp_path.iterdir()} == before | {tmp_path / "target"}
