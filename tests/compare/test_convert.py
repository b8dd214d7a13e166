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
    np.testing.assert_array_equal(tensors["transformer.h.1.attn.c_attn.weight"], qkv.astype(np.float32))
    out = weights()["blocks.0.attention.out.weight"].reshape(6, 6)
    np.testing.assert_array_equal(tensors["transformer.h.0.attn.c_proj.weight"], out.astype(np.float32))
    model, found = read_gpt2(tmp_path / "gpt2")
    assert model == EXPERIMENT.model
    for name, array in weights().items():
        np.testing.assert_array_equal(found[name], array.astype(np.float32))
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


def test_what_this_model_cannot_be_is_refused(tmp_path):
    write_gpt2(tmp_path / "gpt2", EXPERIMENT.model, weights())
    config = json.loads((tmp_path / "gpt2" / CONFIG).read_text())
    for spoil, says in SPOILT:
        (tmp_path / "gpt2" / CONFIG).write_text(json.dumps(config | spoil))
        with pytest.raises(ExperimentError) as refused:
            read_gpt2(tmp_path / "gpt2")
        assert says in str(refused.value), spoil
    pdrops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.25)
    for spoil, dropout in ((pdrops, 0.25), (dict.fromkeys(pdrops), None)):
        kept = {name: value for name, value in (config | spoil).items() if value is not None}
        (tmp_path / "gpt2" / CONFIG).write_text(json.dumps(kept))
        assert read_gpt2(tmp_path / "gpt2")[0].dropout == (dropout or 0.1)  # Hugging Face's default


def test_masks_are_skipped_other_tensors_rejected(tmp_path, capsys):
    write_gpt2(tmp_path / "gpt2", EXPERIMENT.model, weights())
    path = tmp_path / "gpt2" / WEIGHTS_FILE
    tensors = load_file(path)
    save_file({**tensors, "transformer.h.0.attn.bias": np.zeros((1, 1, 5, 5))}, path)
    read_gpt2(tmp_path / "gpt2")
    save_file({**tensors, "lm_head.weight": tensors["transformer.wte.weight"] + 1}, path)
    with pytest.raises(ExperimentError, match="is not tied to the embedding"):
        read_gpt2(tmp_path / "gpt2")
    spoilt = tensors["transformer.ln_f.weight"].copy()
    spoilt[0] = np.nan
    save_file({**tensors, "transformer.ln_f.weight": spoilt}, path)
    assert main(["convert", str(tmp_path / "gpt2"), str(tmp_path / "x")]) == 2
    assert f"{tmp_path / 'gpt2'}: weights/norm.scale has values that are NaN" in capsys.readouterr().err

    # bfloat16 is the upper half of a float32; 8-bit floats are refused.
    halves = {n: (np.ascontiguousarray(a).view("<u4") >> 16).astype("<u2") for n, a in tensors.items()}
    for dtype, stored in (("BF16", halves), ("F8_E4M3", {n: a.astype(np.uint8) for n, a in halves.items()})):
        save_file(stored, path)
        content = path.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header = content[8:end].replace(b'"U16"', b'"BF16"').replace(b'"U8"', b'"F8_E4M3"')
        path.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
        if dtype == "BF16":
            token = read_gpt2(tmp_path / "gpt2")[1]["embedding.token"]
            assert token.dtype == np.float32
            np.testing.assert_array_equal(token.view("<u4") >> 16, halves["transformer.wte.weight"])
            np.testing.assert_allclose(token, tensors["transformer.wte.weight"], rtol=2**-7)
    assert main(["convert", str(tmp_path / "gpt2"), str(tmp_path / "x")]) == 2
    assert "is F8_E4M3, which NumPy lacks: write it as float32" in capsys.readouterr().err


def test_convert_rejects_bad_names(given, tmp_path, capsys):
    assert (FORMATS[".pt"], FORMATS[".safetensors"]) == ("nanogpt", "weights")
    for arguments, says in (
        ((str(given), str(given)), "exists already"),
        ((str(given), str(tmp_path / "no" / "x")), "is missing: create it"),
        (("nowhere", str(tmp_path / "x")), "no checkpoint found"),
        (("nowhere.pt", str(tmp_path / "x")), "does not exist"),
    ):
        before = sorted(tmp_path.iterdir())
        assert main(["convert", *arguments]) == 2
        assert says in capsys.readouterr().err
        assert sorted(tmp_path.iterdir()) == before
