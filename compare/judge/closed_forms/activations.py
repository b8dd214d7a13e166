"""Activations that a block keeps for its backward, tensor by tensor, as this project's models are written.

Read from torchpar/model.py and jaxpar/model.py, and what autograd saves of each operation there:

    torch, a block    16C + H + 4     of them 2C + 4 in the stream, 2C entering regions of tp, 12C + H inside
    JAX, a block      21C + HT + 4    none: 6C + 4 in the stream, 2C entering, 13C + HT inside
                      10C + HT        dots: 2C in the stream, 8C + HT inside
                      C               full, as in torch
    the ends          2C + 2 in torch; 4C + 4 in JAX

numbers a token, of width C, H heads, T positions. tp splits what is inside of its regions, sequence
parallelism the stream as well; what enters a region is whole on every device, gathered or not. A fused
attention keeps H numbers a token and no T x T. JAX keeps more than torch because its residuals are those of
the operations that make up a norm or a GELU, and a scan stacks each by itself. With remat = none it stacks a
copy of the weights of q, k, v and out, too, as matrices: 4 C^2 numbers a block, which are not counted here.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from compare.spec.experiment import Experiment


class StoredActivation(NamedTuple):
    """Numbers a token that a block, or the end of the model, keeps for backward: width * C + ..."""

    tensor: str
    place: Literal["stream", "entering", "inside"]
    """Place: in the residual stream, at the input of a region that tp splits, or inside it."""
    width: int = 0
    heads: int = 0
    """Multiple of H."""
    scores: int = 0
    """Multiple of H T."""
    numbers: int = 0


TORCH_BLOCK = (
    StoredActivation("the stream, for ln_1, and its mean and 1/deviation", "stream", width=1, numbers=2),
    StoredActivation("ln_1's result, for c_attn", "entering", width=1),
    StoredActivation("q, k, v, for attention", "inside", width=3),
    StoredActivation(
        "attention's result, for itself and for c_proj, and its logsumexp", "inside", width=1, heads=1
    ),
    StoredActivation("the stream, for ln_2, and its mean and 1/deviation", "stream", width=1, numbers=2),
    StoredActivation("ln_2's result, for c_fc", "entering", width=1),
    StoredActivation("c_fc's result, for GELU", "inside", width=4),
    StoredActivation("GELU's result, for c_proj", "inside", width=4),
)
TORCH_ENDS = (
    StoredActivation("the stream, for ln_f, and its mean and 1/deviation", "stream", width=1, numbers=2),
    StoredActivation("ln_f's result, for the head", "entering", width=1),
)
BLOCK_INPUT = (StoredActivation("a block's input, to compute it anew", "stream", width=1),)
JAX_NORM = (
    StoredActivation("x - mean, for the variance", "stream", width=1),
    StoredActivation("x - mean, for the result", "stream", width=1),
    StoredActivation(
        "scale / deviation, of every number, and what it is made of", "stream", width=1, numbers=2
    ),
    StoredActivation("the norm's result, for the product", "entering", width=1),
)
JAX_BLOCK = (
    *JAX_NORM,
    StoredActivation("q, k, v, for attention", "inside", width=3),
    StoredActivation("attention's weights", "inside", scores=1),
    StoredActivation("attention's result, for itself, and again for the product", "inside", width=2),
    *JAX_NORM,
    StoredActivation("the derivative of GELU", "inside", width=4),
    StoredActivation("GELU's result, for the product", "inside", width=4),
)
JAX_DOTS = (
    *BLOCK_INPUT,
    StoredActivation("the product q, k, v", "inside", width=3),
    StoredActivation("the product q k", "inside", scores=1),
    StoredActivation("the product of weights and values", "inside", width=1),
    StoredActivation("attention's last product, summed over tp", "stream", width=1),
    StoredActivation("the MLP's first product", "inside", width=4),
)


def tokens(experiment: Experiment) -> float:
    """Tokens of one microbatch that a device works on; under tp its neighbours work on the same."""
    train, layout = experiment.train, experiment.layout
    return train.batch_size / layout.data_parallel / layout.microbatches * experiment.model.block_size


def numbers_kept(kept: Sequence[StoredActivation], experiment: Experiment) -> float:
    """Numbers of a token that one device keeps."""
    model, layout = experiment.model, experiment.layout
    parts = {"stream": layout.tp if layout.sequence_parallel else 1, "entering": 1, "inside": layout.tp}
    return sum(
        (one.width * model.n_embd + model.n_head * (one.heads + one.scores * model.block_size) + one.numbers)
        / parts[one.place]
        for one in kept
    )
