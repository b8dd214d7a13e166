"""Input of an engine, a `Problem`: any model, and how a layout's edits get into it.

Legend: A gradient accumulation, B batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax.traverse_util import flatten_dict
from jax.tree_util import DictKey, keystr

from compare.spec.axes import LAYER
from compare.spec.experiment import Layout
from jaxpar import placement
from jaxpar.placement import Placement
from jaxpar.remat import Remat

Loss = Callable[[Any, Any], jax.Array]
"""loss(params, batch): a scalar, the mean over the batch's leading dim."""
Edit = Callable[[Any], None]
"""Swaps parts of a model before it becomes a loss; parameter paths stay."""
VOCAB = "vocab"
"""The logical axis of a vocabulary."""


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """A model cut where a pipeline may cut it. Each takes the whole tree of parameters, and uses some."""

    embed: Callable[[Any, Any], jax.Array]
    """embed(params, batch): the first stage's beginning, x (B, ...)."""
    layers: Callable[[Any, jax.Array, Any, Any], jax.Array]
    """layers(params, x, batch, first): x after the stacked layers that `params` has, however many. `batch` is
    what x was made of, and `first` the number of the first of these layers among all."""
    loss: Callable[[Any, jax.Array, Any], jax.Array]
    """loss(params, x, batch): the last stage's end, the mean over the batch's leading dim."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A training problem: a loss over a pytree, and what its leaves' dims mean.

    The model knows nothing of a layout. `build(edit)` makes the model, calls `edit(model)` on it once, and
    returns its loss; the edit puts in what the layout needs:

        zero = 3    model.wrap_layer. The loss scans over `model.wrap_layer(layer)`, where `layer(x, weights)`
                    -> (x, None) takes one layer of `params[stacked]`: it is gathered there, and nowhere else.
                    What lies under other keys is gathered before the loss; without the key all is.
        tp          every `jaxpar.model.Linear` and `Embedding` that has a dim named heads, mlp or vocab in
                    `axes`, found by its parameters' keys: `model.blocks.up` has `params["blocks"]["up"]`.
                    A Linear whose outputs are split (column parallel) feeds one whose inputs are (row
                    parallel); in between each feature is treated by itself, as an activation function does.
                    Logits of a split vocabulary go into `model.cross_entropy`, which must be
                    `jaxpar.model.cross_entropy`.
        pp          nothing, but `pieces` in place of `build`.

    Data parallelism and ZeRO 1 and 2 edit nothing: any loss will do, `lambda edit: loss`. A loss that uses
    a parameter past the edits is refused with a ValueError when the step is traced.

    Example:
        An MLP with three residual layers, on four devices. The model can be any object without tp.

        >>> class Layer(nnx.Module):
        ...     def __init__(self):
        ...         dtypes = Dtypes(Precision(dtype="float32"))
        ...         self.up = Linear((8,), (32,), bias=True, dtypes=dtypes)
        ...         self.down = Linear((32,), (8,), bias=True, dtypes=dtypes)
        ...     def __call__(self, x):
        ...         return x + self.down(jax.nn.gelu(self.up(x)))
        >>> class MLP(nnx.Module):
        ...     def __init__(self):
        ...         self.wrap_layer = lambda layer: layer
        ...         self.blocks = nnx.vmap(Layer, axis_size=3)()
        ...     def __call__(self, x):
        ...         graph, layers = nnx.split(self.blocks)
        ...         layer = self.wrap_layer(lambda x, weights: (nnx.merge(graph, weights)(x), None))
        ...         return jax.lax.scan(layer, x, nnx.to_pure_dict(layers))[0]
        >>> def build(edit):
        ...     def edited():
        ...         model = MLP()
        ...         edit(model)
        ...         return model
        ...     graph, _ = nnx.split(nnx.eval_shape(edited))
        ...     def loss(params, batch):
        ...         return jnp.square(nnx.merge(graph, params)(batch["x"]) - batch["y"]).mean()
        ...     return loss
        >>> def draw(shape):
        ...     return 0.3 * np.random.default_rng(0).standard_normal(shape, np.float32)
        >>> up = {"weight": ("layer", "embed", "mlp"), "bias": ("layer", "mlp")}
        >>> down = {"weight": ("layer", "mlp", "embed"), "bias": ("layer", "embed")}
        >>> problem = Problem(
        ...     build=build,
        ...     shapes=nnx.to_pure_dict(nnx.state(nnx.eval_shape(MLP))),
        ...     axes={"blocks": {"up": up, "down": down}},
        ...     remat="none",
        ... )
        >>> spec = Optimizer(learning_rate=1e-2, decay_lr=False)
        >>> optimizer = make_optimizer(spec, decay=jax.tree.map(lambda leaf: leaf.ndim > 2, problem.shapes))
        >>> def train(parallelize, layout, steps=5):
        ...     mesh = make_mesh(layout, platform="cpu")
        ...     sharded = parallelize(problem, optimizer, mesh=mesh, layout=layout)
        ...     weights = jax.tree.map(lambda leaf: draw(leaf.shape), problem.shapes)
        ...     params = jax.device_put(sharded.pad(weights), sharded.params)
        ...     moments = state_like(optimizer, params, sharded.moments)
        ...     state = jax.jit(optimizer.init, out_shardings=moments)(params)
        ...     train_step = jax.jit(sharded.step, compiler_options=sharded.compiler_options)
        ...     batch = {"x": draw((1, 16, 8)), "y": np.ones((1, 16, 8), np.float32)}  # (A, B, ...)
        ...     batch = jax.device_put(batch, sharded.batch)
        ...     for step in range(steps):
        ...         scalars = msgspec.structs.asdict(step_scalars(spec, step))
        ...         params, state, metrics, _ = train_step(params, state, batch, scalars)
        ...     return float(metrics["loss"]), sharded.unpad(params)
        >>> from jaxpar import compiler, manual
        >>> one, weights = train(compiler.parallelize, Layout())
        >>> four, same = train(manual.parallelize, Layout(dp_shard=4, zero=3))
        >>> both, _ = train(manual.parallelize, Layout(dp_shard=2, zero=3, tp=2))
        >>> bool(np.allclose([four, both], one, rtol=1e-5))
        True
        >>> jax.tree.all(jax.tree.map(lambda a, b: bool(np.allclose(a, b, atol=1e-4)), weights, same))
        True
    """

    build: Callable[[Edit], Loss]
    """The loss of the model after an edit, see above."""
    shapes: Any
    """The parameters: a nested dict of arrays or `jax.ShapeDtypeStruct`s."""
    axes: Any
    """Like `shapes`, with a tuple of logical axis names, one for each dim, for a leaf."""
    remat: Remat
    pieces: Callable[[Edit], Pieces] | None = None
    """The model in pieces; pipelines need it."""
    stacked: str = "blocks"
    """The key of `shapes`, if any, whose leaves stack the layers that the model scans over."""

    @property
    def vocab_size(self) -> int:
        """Size of the dim named vocab, without padding; 0 if there is none. Raises ValueError for several."""
        names, shapes = flatten_dict(self.axes), flatten_dict(self.shapes)
        sizes = {
            shapes[path].shape[dim] for path in names for dim, name in enumerate(names[path]) if name == VOCAB
        }
        if len(sizes) > 1:
            raise ValueError(f"axes: dims of {sorted(sizes)} are all named {VOCAB}: it is one vocabulary")
        return next(iter(sizes), 0)

    def edited(self, edits: Sequence[Edit]) -> Loss:
        """The loss of the model after several edits, in order."""
        return self.build(in_order(edits))

    def edited_pieces(self, edits: Sequence[Edit]) -> Pieces:
        """The pieces of the model after several edits, in order.

        Raises:
            ValueError: it has no pieces, or no stacked layers.
        """
        if self.pieces is None:
            raise ValueError("layout.pp needs a model in pieces: give Problem.pieces")
        if self.stacked not in self.shapes:
            raise ValueError(f"layout.pp needs stacked layers: Problem.shapes has no key {self.stacked!r}")
        return self.pieces(in_order(edits))

    def place(self, layout: Layout, *, split: dict[str, str]) -> Any:
        """The placements of all leaves: a tree of `Placement`s. See `placement.place`.

        Raises:
            TypeError: the parameters are no nested dicts.
            ValueError: axes that do not fit the shapes, or a dim that cannot be split so.
        """

        def place(path: tuple[Any, ...], leaf: Any, axes: tuple[str, ...]) -> Placement:
            if other := next((key for key in path if not isinstance(key, DictKey)), None):
                raise TypeError(f"Problem.shapes: {other} in {keystr(path)} is no key of a dict: nest dicts")
            self._check(".".join(str(key.key) for key in path), leaf.shape, axes, layout, split)
            return placement.place(
                leaf.shape,
                axes,
                split=split,
                degrees=layout.axes,
                chunks=layout.chunks,
            )

        return jax.tree_util.tree_map_with_path(place, self.shapes, self.axes)

    def _check(
        self, name: str, shape: tuple[int, ...], axes: tuple[str, ...], layout: Layout, split: dict[str, str]
    ) -> None:
        is_stacked = name.split(".")[0] == self.stacked
        if len(axes) != len(shape) or is_stacked != (axes[:1] == (LAYER,)) or LAYER in axes[1:]:
            first = f", the first of them {LAYER!r}" if is_stacked else f", none of them {LAYER!r}"
            raise ValueError(
                f"axes of {name}: {axes}, and its shape is {shape}: give one name for each dim{first}"
            )
        if is_stacked and shape[0] % (layout.pp * layout.chunks):
            raise ValueError(
                f"{name} stacks {shape[0]} layers: layout.pp = {layout.pp} x layout.chunks = {layout.chunks} "
                "does not divide them"
            )
        # What pads a vocabulary gets no gradient, and what pads a hidden dim may.
        for size, axis in zip(shape, axes, strict=True):
            if split.get(axis) and axis != VOCAB and size % layout.tp:
                raise ValueError(
                    f"{name} has {axis} = {size}, which layout.tp = {layout.tp} does not divide: change one "
                    "of them, or name the dim otherwise"
                )


def in_order(edits: Sequence[Edit]) -> Edit:
    """Several edits as one."""

    def edit(model: Any) -> None:
        for each in edits:
            each(model)

    return edit
