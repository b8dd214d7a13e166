"""Work: what one step of a device computes, as it was seen in the program; RUN_DIR/work.json.

A manifest can only repeat the request. This is what the code did, as PyTorch's dispatcher or JAX's account of
the traced step tells. `compare.judge.strategy` holds it against what was asked for.
"""

from typing import Literal

from msgspec import Struct, field

WORK = "work.json"
Part = Literal["products", "activations", "logits"]
"""Matrix products and GELUs of the blocks, and the head's products."""
Kept = Literal["norm", "residual", "softmax", "router", "loss"]
"""What products in 16 bits leave in the dtype of the weights: LayerNorms, the sums of the residual stream,
attention's softmax (of which a fused kernel does not tell), products that make a router's logits, and the
loss from its logits on."""


class ObservedWork(Struct, frozen=True, kw_only=True):
    """Observed work of one step, all devices together."""

    products: dict[str, int]
    """Matrix products, but a router's, by the dtype of what is multiplied; tf32 where float32 may be rounded
    to it."""
    forward: dict[Part, int]
    """How many operations of each part forward runs."""
    again: dict[Part, int]
    """How many backward runs again."""
    logits_positions: list[int]
    """Positions (T) of the logits that exist at once, in forward: block_size over train.loss_chunks."""
    kept: dict[Kept, list[str]] = field(default_factory=dict)
    """Dtypes of their results in forward."""
    tasks: list[list[str]] = field(default_factory=list)
    """Of a pipeline: the tasks of each of its ranks, in words, in the order in which they were done. Empty
    where a compiler orders them."""
    compiled: str = ""
    """What compiled the step, and how many graphs there are; empty where nothing did, and where that is the
    engine's only way. Then blocks and logits are those of the graph that was compiled, as often as it ran."""
    gradient_messages: list[list[tuple[int, bool]]] = field(default_factory=list)
    """All-reduces of gradients over replicas, where they are our own calls, in order, of each rank of a
    pipeline: bytes, and whether it began before backward had ended."""
