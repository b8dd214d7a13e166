"""A check that a loss uses a layout's edits of its model: else it would use parts as if whole.

The loss is traced once as for one device, with edits that change no number and leave marks (`tracing.flow`)
where the real ones gather and split. A parameter that reaches the loss unmarked was used past them.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from compare.spec.axes import DP_SHARD, TP
from compare.spec.experiment import Layout
from jaxpar.model import Embedding, Linear
from jaxpar.placement import Placement
from jaxpar.problem import Edit, Loss, Problem
from jaxpar.tracing.flow import Label, adds, clears, labels_reaching
from jaxpar.tracing.sites import dotted, find_sites

SHARD, PART, OUTPUT = "shard of a layer", "part of a weight", "part of an output"
LISTED = 3  # names in a message; more are counted


def require_edits(
    problem: Problem, placements: Any, batch: Any, *, layout: Layout, gathers_layers: bool
) -> None:
    """Refuse a loss that uses parameters past the edits of a layout.

    Args:
        problem: the training problem.
        placements: of its leaves.
        batch: a pytree of arrays (A, B, ...), of which only shapes are read.
        layout: its tp is what edits split over.
        gathers_layers: whether layers are stored as shards that an edit gathers.

    Raises:
        ValueError: it does; the message names the parameters, and what to do.
    """
    if layout.tp == 1 and not gathers_layers:
        return
    edits: list[Edit] = [mark_layers] if gathers_layers else []
    if layout.tp > 1:
        edits.append(mark_modules(problem, placements, sequence_parallel=layout.sequence_parallel))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), problem.shapes)
    microbatch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
    traced = jax.make_jaxpr(_whole_loss(problem, edits, pipeline=layout.pp > 1))(shapes, microbatch)

    def labels(path: tuple[Any, ...], p: Placement) -> frozenset[Label]:
        name = dotted(tuple(key.key for key in path))
        is_shard = gathers_layers and path[0].key == problem.stacked and DP_SHARD in p.dims
        return frozenset((kind, name) for kind, holds in ((SHARD, is_shard), (PART, TP in p.dims)) if holds)

    of_leaves = jax.tree.leaves(
        jax.tree_util.tree_map_with_path(labels, placements), is_leaf=lambda x: isinstance(x, frozenset)
    )
    of_batch = [frozenset()] * len(jax.tree.leaves(microbatch))
    _refuse(labels_reaching(traced, [*of_leaves, *of_batch]), problem, layout)


def mark_layers(model: Any) -> None:
    """An edit of the model, in the place of one that gathers each layer."""

    def wrap_layer(layer: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, shards: layer(x, jax.tree.map(lambda w: clears(w, SHARD), shards))

    model.wrap_layer = wrap_layer


def mark_modules(problem: Problem, placements: Any, *, sequence_parallel: bool) -> Edit:
    """An edit of the model, in the place of one that splits its modules."""

    def edit(model: Any) -> None:
        sites = find_sites(model, problem, placements)
        if sequence_parallel and not any(isinstance(site.module, Embedding) for site in sites):
            raise ValueError(
                "layout.sequence_parallel needs a model with a jaxpar.model.Embedding whose vocabulary tp "
                "splits: it is what gives each device its positions"
            )
        for site in sites:
            if isinstance(site.module, Embedding):
                site.replace(model, MarkedEmbedding(site.module, dotted(site.path)))
            else:
                marked = MarkedRow if site.splits_inputs else MarkedColumn
                site.replace(model, marked(site.module, dotted(site.path)))
        if problem.vocab_size:
            plain = model.cross_entropy
            model.cross_entropy = lambda logits, targets: plain(clears(logits, OUTPUT), targets)

    return edit


class MarkedColumn(Linear):
    """Replaces a Linear with split outputs: only a row-parallel layer may use them."""

    def __init__(self, linear: Linear, name: str):
        self.contracted, self.compute = linear.contracted, linear.compute
        self.weight, self.bias = linear.weight, linear.bias
        self.name = name

    def __call__(self, x: jax.Array) -> jax.Array:
        return adds(Linear.__call__(_marked(self), x), (OUTPUT, self.name))


class MarkedRow(MarkedColumn):
    """Replaces a Linear with split inputs: its outputs are full."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return Linear.__call__(_marked(self), clears(x, OUTPUT))


class MarkedEmbedding(Embedding):
    """Replaces an Embedding: its vectors are full, its logits split."""

    def __init__(self, embedding: Embedding, name: str):
        self.compute, self.token, self.position = embedding.compute, embedding.token, embedding.position
        self.name = name

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        return Embedding.__call__(_marked(self), tokens_BT)

    def project(self, x_BTC: jax.Array) -> jax.Array:
        return adds(Embedding.project(_marked(self), x_BTC), (OUTPUT, f"{self.name}.logits"))


def _marked(module: Any) -> Any:
    """The module, its parameters marked as used by itself."""
    graph, state = nnx.split(module)
    return nnx.merge(graph, jax.tree.map(lambda w: clears(w, PART), state))


def _whole_loss(problem: Problem, edits: list[Edit], *, pipeline: bool) -> Loss:
    if not pipeline:
        return problem.edited(edits)
    pieces = problem.edited_pieces(edits)

    def loss(params: Any, batch: Any) -> jax.Array:
        return pieces.loss(params, pieces.layers(params, pieces.embed(params, batch), batch, 0), batch)

    return loss


def _refuse(reached: frozenset[Label], problem: Problem, layout: Layout) -> None:
    def names(kind: str) -> str:
        found = sorted(name for of, name in reached if of == kind)
        more = f" and {len(found) - LISTED} more" if len(found) > LISTED else ""
        return ", ".join(found[:LISTED]) + more

    if shards := names(SHARD):
        raise ValueError(
            f"layout.zero = {layout.zero}: the loss uses {shards} ungathered: it must scan over "
            f"model.wrap_layer(layer), model being what build's edit was given (see jaxpar.problem.Problem)"
        )
    if parts := names(PART):
        raise ValueError(
            f"layout.tp = {layout.tp}: {parts} would be split, and the loss uses it otherwise than by "
            f"calling the jaxpar.model.Linear or Embedding that has it, of the model that build's edit was "
            f"given (see jaxpar.problem.Problem)"
        )
    if outputs := names(OUTPUT):
        raise ValueError(
            f"layout.tp = {layout.tp}: what {outputs} gives is split, and reaches the loss so: give it to a "
            f"Linear whose inputs are split, or logits to model.cross_entropy (see jaxpar.problem.Problem)"
        )
