"""Observed work of one step, RUN_DIR/work.json.

A manifest repeats the request. This file counts what the program did: PyTorch's dispatcher or JAX's traced
step provides the counts. `compare.judge.strategy` compares them with the layout.
"""

from typing import Literal

from msgspec import Struct, field

WORK = "work.json"
Part = Literal["products", "activations", "logits"]
"""Matrix products and GELUs of the blocks, and the head's products."""
Kept = Literal["norm", "residual", "rotation", "softmax", "router", "ring", "loss"]
"""Operations that stay in the dtype of the weights when products use 16 bits. norm and router are all
operations of these modules. rotation is RoPE with its cosines. ring is the sums of dK and dV that pass
around. A fused kernel hides its softmax."""


class ObservedWork(Struct, frozen=True, kw_only=True):
    """Observed work of one step, all devices together."""

    products: dict[str, int]
    """Number of matrix products, without the router's, by operand dtype; tf32 if float32 may be rounded to
    it."""
    forward: dict[Part, int]
    """Number of operations in forward, by part."""
    again: dict[Part, int]
    """Number of operations that backward recomputes, by part."""
    logits_positions: list[int]
    """Positions (T) of the logits that exist at one time in forward: block_size / train.loss_chunks."""
    kept: dict[Kept, list[str]] = field(default_factory=dict)
    """Dtypes of the results in forward, by operation; also of the operands, unless these are products. In
    torchpar the cosines of RoPE and the sums around a ring count as 16 bits if most entries fit into them."""
    attention: list[str] = field(default_factory=list)
    """How forward computes attention: the size of the weights that exist at one time, "128 x 128"
    queries and keys, or the name of the fused kernel that hides them."""
    rings: list[str] = field(default_factory=list)
    """The orders of work of ring attention, each once. h sends K, V to the next device, w waits for them, and
    p multiplies. In torchpar g sends dK, dV, and v waits for them. In jaxpar the order of a loop's body
    follows from the dependences of its operations."""
    tasks: list[list[str]] = field(default_factory=list)
    """Tasks of each pipeline rank, in the order of execution. Empty if a compiler orders the tasks."""
    compiled: str = ""
    """Compiler of the step and its number of graphs; empty without compilation, or if the engine always
    compiles. The counts above are then the graph's counts, times its number of runs."""
    gradient_messages: list[list[tuple[int, bool]]] = field(default_factory=list)
    """Gradient all-reduces over replicas that our code calls, in order, for each pipeline rank: bytes, and
    whether the call started before backward ended."""
