"""`shardpair convert`: from and to what others use; nothing half-written, nothing executed."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from compare.checkpoint.reader import CheckpointReader
from compare.cli import main
from compare.commands.convert import FORMATS
from compare.formats.huggingface import CONFIG, WEIGHTS_FILE, read_gpt2, write_gpt2
from compare.spec.experiment import Experiment, ExperimentError, Layout, Model, Precision
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
    assert main(["convert", str(given), str(tmp_path / "copy"), "--json"]) == 0
    assert_is_random(tmp_path / "copy", EXPERIMENT)
    printed = capsys.readouterr().out.splitlines()
    said = "weights, of torch-manual, at step 7, after 5 updates: 2 layers of width 6, dropout 0.0, float64"
    assert f"w.safetensors: {said}, data of stdlib" in printed[0]
    assert json.loads("".join(printed[1:]))["format"] == "checkpoint"


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
        ("nowhere", "x", "no checkpoint found"),
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
