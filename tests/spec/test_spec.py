"""The contract: strict specs, deterministic weights and data, one schedule, one optimizer step."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compare.numerics.data import open_corpus
from compare.numerics.optimizer import learning_rate, reference_step
from compare.numerics.parameters import initial_parameters, parameter_count, parameter_table
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import (
    Data,
    Experiment,
    ExperimentError,
    Layout,
    Model,
    Optimizer,
    Precision,
    Train,
    load,
    named_experiments,
    parse,
    revalidate,
    to_toml,
)
from tests.support.rows import short

SMALL = Experiment(model=Model(n_layer=1, n_head=2, n_embd=8, block_size=8, bias=True))


REFUSED = {
    "[model]\nn_layr = 2": "model.n_layr: no such field; did you mean n_layer?",
    '[train]\nbatch_size = "8"': 'train.batch_size = "8": give a whole number',
    "[model]\nn_layer = 0": "model.n_layer = 0: give 1 or more",
    '[layout]\ngradient_sync = "magic"': '= "magic": give naive, flat, overlapped or bucketed',
    "[model]\nn_embd = 1\nn_head = 1": "a LayerNorm of one feature is always zero",
    "[model]\nn_head = 3": "model.n_head = 3 does not divide model.n_embd = 128",
    '[model]\nposition = "rope"\nn_head = 128': "leaves an odd number of model.n_embd = 128 to each head",
    "[model]\nn_kv_head = 3": "model.n_kv_head = 3 does not divide model.n_head = 4",
    "[model]\nn_kv_head = 2\n[layout]\ntp = 4": "layout.tp = 4 does not divide model.n_kv_head = 2",
    "[model]\ndropout = 1e-6": "model.dropout = 1e-06 would drop nothing, or everything",
    "[model]\ndropout = 0.1\nblock_size = 131072": "more weights of attention than counters",
    "[model]\nn_experts = 1": "model.experts_per_token = 2 is more than model.n_experts = 1",
    "[model]\nn_experts = 4\n[layout]\npp = 2": "layout.pp = 2 with model.n_experts = 4",
    "[layout]\ndp_shard = 2\nep = 2": "layout.ep = 2 with model.n_experts = 0: the model has no experts",
    "[model]\nn_experts = 4\n[layout]\ndp_shard = 2\nep = 4": "does not divide layout.dp_shard = 2",
    "[model]\nn_experts = 3\n[layout]\ndp_shard = 2\nzero = 1\nep = 2": "divide model.n_experts = 3",
    '[model]\nn_experts = 4\n[layout]\ncompile = "inductor"': "layout.compile = inductor with model",
    "[train]\nloss_chunks = 3": "train.loss_chunks = 3 does not divide model.block_size = 128",
    "[train]\nloss_chunks = 2\n[layout]\npp = 2": "raise layout.microbatches instead",
    "[train]\nloss_chunks = 2\n[layout]\ntp = 2\nsequence_parallel = true": "layout.sequence_parallel = true",
    "[layout]\ndp_replicate = 3": "train.batch_size = 16 is not divisible by layout.dp_replicate = 3",
    "[layout]\ndp_replicate = 2\ndp_shard = 16\nzero = 3": "layout.dp_replicate = 2 x layout.dp_shard = 16",
    "[layout]\nzero = 3": "layout.zero = 3 with layout.dp_shard = 1",
    "[layout]\ndp_shard = 2": "layout.dp_shard = 2 with layout.zero = 0",
    "[layout]\nreshard_after_forward = false": "layout.reshard_after_forward = false with layout.zero = 0",
    "[layout]\ntp = 3": "layout.tp = 3 does not divide model.n_head = 4",
    "[layout]\nsequence_parallel = true": "layout.sequence_parallel = true with layout.tp = 1",
    "[layout]\ntp = 4\nsequence_parallel = true\n[model]\nblock_size = 30": "model.block_size = 30",
    "[layout]\ncp = 3": "layout.cp = 3 does not divide model.block_size = 128",
    "[model]\nblock_size = 12\n[layout]\ncp = 4\nzigzag = true": "layout.cp = 4 x 2 of layout.zigzag",
    '[layout]\ncp = 8\ncontext = "ulysses"': "layout.cp = 8 does not divide 4 heads (model.n_head = 4",
    '[model]\nn_kv_head = 2\n[layout]\ncp = 4\ncontext = "ulysses"': "divide 2 heads of keys and values (",
    '[model]\ndropout = 0.1\n[layout]\ncp = 2\ncontext = "ring"': "dropout is of whole rows",
    "[layout]\nzigzag = true": "layout.zigzag = true with layout.cp = 1",
    "[layout]\nmicrobatches = 4": "layout.microbatches = 4 with layout.pp = 1",
    "[layout]\npp = 8": "stages do not divide model.n_layer = 4",
    "[layout]\npp = 4\nmicrobatches = 3": "layout.microbatches = 3 does not divide the 16 sequences",
    "[layout]\npp = 4\nmicrobatches = 2": "has 2 microbatches for layout.pp = 4 stages",
    '[layout]\npp = 2\nschedule = "interleaved"': "interleaved has 2 or more chunks",
    "[layout]\npp = 2\nchunks = 2\nmicrobatches = 4": "layout.schedule = 1f1b with layout.chunks = 2",
    '[train]\nbatch_size = 6\n[layout]\npp = 2\nchunks = 2\nmicrobatches = 3\nschedule = "interleaved"': (
        "interleaved has 3 microbatches, which layout.pp = 2 does not divide"
    ),
    "[train]\nbatch_size = 131072\n[layout]\npp = 2\nmicrobatches = 131072": "the most is 200,000",
    "[model\n": "line 1",
}


@pytest.mark.parametrize("text", REFUSED, ids=short)
def test_bad_spec_is_refused(text):
    with pytest.raises(ExperimentError) as caught:
        parse(text, origin="my.toml")
    message = str(caught.value)
    assert REFUSED[text] in message
    assert message.startswith("my.toml: ")
    assert "\n" not in message


@pytest.mark.parametrize("name", named_experiments())
def test_spec_survives_its_own_toml(name):
    experiment = load(name)
    assert parse(to_toml(experiment)) == experiment
    assert parse(to_toml(experiment).encode("utf-8-sig")) == experiment  # a byte-order mark of Windows


def test_gpt2_has_its_published_size():
    model = Model(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50257, bias=True)
    assert parameter_count(model) == 124_439_808  # GPT-2 small, head tied


def test_initial_weights_are_nanogpts():
    model = Model(n_layer=2, n_head=4, n_embd=256, block_size=64, bias=True)
    weights = initial_parameters(Experiment(model=model, precision=Precision(dtype="float64")))
    assert weights["embedding.token"].std() == pytest.approx(0.02, rel=0.02)
    assert weights["blocks.1.attention.out.weight"].std() == pytest.approx(0.02 / 2, rel=0.02)
    assert (weights["blocks.0.norm1.scale"] == 1).all()
    assert not weights["blocks.0.attention.qkv.bias"].any()
    assert weights["blocks.0.attention.qkv.weight"].shape == (256, 3, 4, 64)


def test_initial_weights_and_data_never_change():
    """The values themselves: a record made years ago must stay comparable."""
    weights = initial_parameters(msgspec.structs.replace(SMALL, precision=Precision(dtype="float64")))
    np.testing.assert_allclose(
        weights["embedding.token"][0, :3], GOLDEN_WEIGHTS, rtol=1e-14, err_msg="initial weights moved"
    )
    inputs, _ = SYNTHETIC.batch(SMALL, 7)
    assert inputs[0, 0].tolist() == GOLDEN_ROW


@given(step=st.integers(0, 10**6), accumulation=st.integers(1, 3), batch_size=st.integers(1, 5))
def test_targets_are_the_next_tokens(step, accumulation, batch_size):
    experiment = msgspec.structs.replace(
        SMALL,
        train=Train(batch_size=batch_size, gradient_accumulation_steps=accumulation),
    )
    inputs, targets = SYNTHETIC.batch(experiment, step)
    again, _ = SYNTHETIC.batch(experiment, step)
    assert inputs.shape == targets.shape == (accumulation, batch_size, 8)
    assert inputs.dtype == targets.dtype == np.int32
    assert (inputs == again).all()
    assert (inputs[..., 1:] == targets[..., :-1]).all()


def test_rows_do_not_depend_on_passes():
    """Twelve sequences a step are the same twelve, however they are spread over passes."""
    flat = msgspec.structs.replace(SMALL, train=Train(batch_size=12))
    cut = msgspec.structs.replace(SMALL, train=Train(batch_size=4, gradient_accumulation_steps=3))
    assert (SYNTHETIC.batch(flat, 5)[0].reshape(12, 8) == SYNTHETIC.batch(cut, 5)[0].reshape(12, 8)).all()


def test_bin_files_and_text_files(tmp_path):
    tokens = np.arange(200, dtype="<u2")
    tokens.tofile(tmp_path / "train.bin")
    tokens[:50].tofile(tmp_path / "val.bin")
    folder = open_corpus(msgspec.structs.replace(SMALL, data=Data(source=str(tmp_path))))
    assert (folder.train == tokens).all()
    assert len(folder.validation) == 50
    (tmp_path / "words.txt").write_bytes(b"to be or not to be, that is the question" * 3)
    text = open_corpus(msgspec.structs.replace(SMALL, data=Data(source=str(tmp_path / "words.txt"))))
    assert bytes(text.train[:5]) == b"to be"
    assert len(text.train) + len(text.validation) == 120


def test_learning_rate_is_nanogpts():
    optimizer = Optimizer(learning_rate=1.0, min_lr=0.1, warmup_iters=4, lr_decay_iters=14)
    rates = [learning_rate(optimizer, step) for step in range(20)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[9] == pytest.approx(0.55)  # halfway down the cosine
    assert rates[14:] == [0.1] * 6
    short = Optimizer(learning_rate=1.0, min_lr=0.1, warmup_iters=4, lr_decay_iters=2)
    revalidate(msgspec.structs.replace(SMALL, optimizer=short))
    assert [learning_rate(short, step) for step in range(6)] == [0.2, 0.4, 0.6, 0.8, 0.1, 0.1]
    assert learning_rate(Optimizer(decay_lr=False, learning_rate=0.3), 0) == 0.3


def test_adamw_by_hand():
    """One scalar weight, one step, worked out on paper."""
    optimizer = Optimizer(
        learning_rate=0.1, decay_lr=False, weight_decay=0.5, beta1=0.9, beta2=0.99, eps=0.0001, grad_clip=1.0
    )
    table = (parameter_table(SMALL.model)[0],)
    name = table[0].name
    weights, moments = reference_step(optimizer, table, {name: np.array(2.0)}, {name: np.array(-4.0)}, {}, 0)
    clipped = -4.0 / (4.0 + 1e-6)
    assert moments["m"][name] == pytest.approx(0.1 * clipped)
    assert moments["v"][name] == pytest.approx(0.01 * clipped**2)
    assert weights[name] == pytest.approx(2.0 * (1 - 0.05) - 0.1 * clipped / (abs(clipped) + 0.0001))
    _, small = reference_step(optimizer, table, {name: np.array(2.0)}, {name: np.array(0.5)}, {}, 0)
    assert small["m"][name] == pytest.approx(0.05)  # which clipping makes no larger


def test_engines_refuse_what_they_cannot_do():
    overlapped = Layout(dp_replicate=2, gradient_sync="overlapped")
    assert "possible: naive, flat, bucketed" in ENGINES["jax-manual"].why_not(overlapped)
    assert ENGINES["torch-manual"].gradient_sync_for(overlapped) == "overlapped"
    assert ENGINES["torch-library"].gradient_sync_for(overlapped) == "ddp"
    assert ENGINES["jax-manual"].gradient_sync_for(Layout(gradient_sync="overlapped")) == "none"


SYNTHETIC = open_corpus(msgspec.structs.replace(SMALL, data=Data(source="synthetic")))
GOLDEN_WEIGHTS = [0.010027022973517232, -0.016681803206707233, 0.022362824111007536]
GOLDEN_ROW = [5, 6, 235, 236, 237, 234, 235, 236]
