"""What a step computes, as JAX traced it: dtypes of products, what runs again, a pipeline's tasks.

The traced program and not XLA's: XLA on a CPU multiplies 16 bits as float32, whatever it was told.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
from jax import lax

from compare.contract.work import Again, ObservedWork
from compare.pipeline.schedules import Kind, Task
from compare.pipeline.ticks import BACKWARD, FORWARD, Ticks
from jaxpar.measure.hlo import AGAIN
from jaxpar.model import HEAD

PRODUCT, GELUS = "dot_general", frozenset({"erf", "erfc", "tanh"})
BACKWARDS = ("transpose(", AGAIN)
KINDS = {FORWARD: Kind.FORWARD, BACKWARD: Kind.BACKWARD}


def work_of(program: Any, ticks: Ticks | None = None) -> ObservedWork:
    """Observed work of a traced step, `jax.jit(step).trace(...).jaxpr`, and of the pipeline in it."""
    products, again, positions = Counter[str](), set[Again](), set[int]()
    for equation, scopes in operations(program.jaxpr):
        name, is_of_head = equation.primitive.name, HEAD in scopes
        if name == PRODUCT:
            products[_dtype_of(equation)] += 1
            if is_of_head and not any(scope in scopes for scope in BACKWARDS):
                positions.add(equation.invars[0].aval.shape[-2])
        if AGAIN in scopes and not is_of_head:
            again |= {"products"} if name == PRODUCT else {"activations"} if name in GELUS else set()
    if ticks and not ticks.kept_slots:  # backward begins with the forward of its stage
        again |= {"products", "activations"}
    return ObservedWork(
        products=dict(products),
        again=sorted(again),
        logits_positions=sorted(positions),
        tasks=[_tasks_of(ticks, rank) for rank in range(ticks.ranks)] if ticks else [],
    )


def operations(jaxpr: Any, outer: str = "") -> Iterator[tuple[Any, str]]:
    """Equations of a program and of those within (loops, branches, calls), each with the scopes around it."""
    for equation in jaxpr.eqns:
        scopes = f"{outer}/{equation.source_info.name_stack}"
        yield equation, scopes
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from operations(inner, scopes)


def _tasks_of(ticks: Ticks, rank: int) -> list[str]:
    """The tasks of a rank, in order."""
    table = ticks.tasks.kind, ticks.tasks.stage, ticks.tasks.microbatch
    rows = zip(*(column[:, rank].tolist() for column in table), strict=True)
    return [str(Task(KINDS[kind], *of)) for kind, *of in rows if kind in KINDS]


def _dtype_of(product: Any) -> str:
    """Of its operands, which have one; on a GPU float32 is multiplied as TF32 unless told otherwise."""
    dtype = str(product.invars[0].aval.dtype)
    precision = product.params["precision"]
    is_exact = precision is not None and set(precision) == {lax.Precision.HIGHEST}
    is_rounded = dtype == "float32" and not is_exact and jax.default_backend() == "gpu"
    return "tf32" if is_rounded else dtype
