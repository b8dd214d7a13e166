"""`shardpair sample`: both frameworks draw the same text from a checkpoint."""

import json
from pathlib import Path

import pytest

from compare.cli import main
from compare.spec.experiment import Experiment, Model
from tests.support.checkpoints import write_random


@pytest.fixture
def given(tmp_path: Path) -> Path:
    model = Model(n_layer=2, n_head=2, n_embd=8, block_size=6, bias=True)
    return write_random(tmp_path, Experiment(model=model))


@pytest.mark.usefixtures("warm_sides")
def test_both_frameworks_draw_the_same(given, capsys):
    for options in (("--temperature", "0"), ("--samples", "3", "--seed", "5")):
        arguments = ("sample", str(given), "--prompt", "ab", "--tokens", "12", *options)
        assert main([*arguments, "--sides", "torchpar", "jaxpar", "--json"]) == 0
        drawn = json.loads(capsys.readouterr().out)["values"]["tokens"]
        assert drawn["torchpar"] == drawn["jaxpar"]
        assert all(len(tokens) == 14 and tokens[:2] == [97, 98] for tokens in drawn["jaxpar"])


CANNOT = (
    (("--prompt", ""), "--prompt is empty"),
    (("--prompt_tokens", "256"), "token 256: the model has 0 to 255"),
    (("--tokens", "0"), "--tokens"),
    (("--temperature", "inf"), "--temperature"),
)


@pytest.mark.parametrize(("arguments", "words"), CANNOT, ids=["prompt", "token", "tokens", "temperature"])
def test_bad_request_is_rejected(given, capsys, arguments, words):
    assert main(["sample", str(given), *arguments]) == 2
    assert words in capsys.readouterr().err
