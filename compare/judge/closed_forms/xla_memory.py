"""What XLA is known to hold at the peak of a step instead of what `peak_memory` says, each with a name.

Written down after docs/memory.md's figures were seen, of jax 0.10.2 on a CPU, most of them from the buffers
that were alive then, "shards are added up", "the table alone" and "gathered weights are residuals" from their
bytes: a pattern explains a class only if it gives its bytes. Another version of XLA may do otherwise; then a
class is not explained. tests/jaxpar/test_jaxpar_memory_profile.py holds them to another size of the
model; "copies of weights" was found there, and has no third size.
"""

from collections.abc import Iterator

from compare.contract.memory_profile import Class
from compare.judge.closed_forms.activations import tokens
from compare.judge.closed_forms.memory import on_one_of_tp
from compare.numerics.parameters import block_parameters, end_parameters, storage_dtype
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment

AGAIN, EARLIER, SHARDS = "tied gradient twice", "before the table's gradient", "shards are added up"
POSITIONS, UNSUMMED = "positions' gradient", "a gradient before its sum"
TABLE, GONE = "the table alone", "gathered again later"
RESIDUALS, COPIES = "gathered weights are residuals", "copies of weights"
PATTERNS = {
    AGAIN: "the token table is used at both ends; XLA keeps the gradient of each use until it adds them up.",
    EARLIER: "XLA's peak is an operation before the one that makes the token table's gradient, or has that "
    "gradient among what it communicates.",
    SHARDS: "backward's loop reduces and adds up shards of the blocks' gradients, and not whole ones.",
    POSITIONS: "a device's part of the positions has its gradient in zeros for all of them, from the start.",
    UNSUMMED: "XLA sums the last norm's gradient after backward, from a product as large as the stream.",
    TABLE: "of the unit that is gathered for both ends XLA keeps the token table; positions and the last "
    "norm are gone by then.",
    GONE: "forward is done with the tables, backward has not gathered them again: a norm's weight is left.",
    RESIDUALS: "what a scan over layers gathers and keeps for backward, it stacks with its activations.",
    COPIES: "the table, the shards of the blocks' matrices, and q, k, v and out of each block once more: XLA "
    "copies them into the order of its products, and keeps them with what forward leaves.",
}
"""What XLA is known to do instead of what the closed form says, by name: each gives its bytes."""


def held_by_xla(
    engine: str, experiment: Experiment, *, blocks: float, activations: float
) -> dict[Class, dict[str, float]]:
    """Bytes of a class that XLA is known to hold, by the names in PATTERNS of what makes them so.

    Args:
        engine: one of JAX.
        experiment: its layout, model, precision.
        blocks: numbers of all blocks' gradients, as backward's loop makes them.
        activations: their closed form, in bytes.
    """
    layout, itemsize = experiment.layout, storage_dtype(experiment).itemsize
    (token, _), _ = end_parameters(experiment.model)
    table = on_one_of_tp([token], layout)
    found: dict[Class, dict[str, float]] = {
        "gradients": {name: itemsize * size for name, size in _gradients(engine, experiment, blocks, table)},
        "gathered parameters": {TABLE: itemsize * table, GONE: itemsize * experiment.model.n_embd},
    }
    if layout.zero == 3 and not layout.reshard_after_forward:
        found["activations"] = {RESIDUALS: activations + itemsize * blocks * layout.dp_shard}
    elif layout.zero == 3 and layout.tp > 1 and ENGINES[engine].sends_by == "xla":
        found["activations"] = {COPIES: activations + itemsize * (table + _copied(experiment))}
    return found


def _gradients(
    engine: str, experiment: Experiment, blocks: float, table: float
) -> Iterator[tuple[str, float]]:
    """Numbers of gradients, by the names of the patterns that make them so."""
    layout, model = experiment.layout, experiment.model
    yield EARLIER, blocks
    if ENGINES[engine].sends_by == "xla":
        yield AGAIN, blocks + 2 * table
        if layout.zero == 2:
            yield f"{SHARDS}, {EARLIER}", blocks / layout.dp_shard
    elif layout.sequence_parallel:
        (_, position), _ = end_parameters(model)
        yield f"{EARLIER}, {POSITIONS}", blocks + position.size
    else:
        yield f"{EARLIER}, {UNSUMMED}", blocks + tokens(experiment) * model.n_embd


def _copied(experiment: Experiment) -> float:
    """Numbers of the blocks' matrices of a device, as shards, and of q, k, v and out, whole but for tp."""
    layout, model = experiment.layout, experiment.model
    matrices = [one for one in block_parameters(model, 0) if len(one.shape) > 1]
    attention = 4 * model.n_embd**2 / layout.tp
    return model.n_layer * (on_one_of_tp(matrices, layout) / layout.dp_shard + attention)
