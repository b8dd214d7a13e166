"""The work of a traced step: dtypes of products, recomputed operations, the tasks of a pipeline.

It is read from the traced program, not from XLA's: on a CPU, XLA multiplies 16 bits as float32.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal
from jax.interpreters.partial_eval import dce_jaxpr

from compare.contract.work import Kept, ObservedWork, Part
from compare.pipeline.schedules import Kind, Task
from compare.pipeline.ticks import BACKWARD, FORWARD, Ticks
from jaxpar.functional import KEEPS, RELU
from jaxpar.measure.hlo import AGAIN
from jaxpar.model import HEAD

PRODUCT, GELUS = "dot_general", frozenset({"erf", "erfc", "tanh"})
ALONE: dict[str, Kept] = {"log": "loss"}
"""Operations that occur in one part of the model alone."""
FUSED = "dot_product_attention"
"""The first words of the primitive of cuDNN's attention."""
READS_PRODUCTS = ("residual", "rotation")
"""Parts that read products in 16 bits."""
KV_HOP = "/for_activations_by_hand"
"""The scope of the hops of K, V, of `collectives.ledger_scope`."""
KINDS = {FORWARD: Kind.FORWARD, BACKWARD: Kind.BACKWARD}


def work_of(program: Any, ticks: Ticks | None = None) -> ObservedWork:
    """The observed work of a traced step, `jax.jit(step).trace(...).jaxpr`, and of its pipeline."""
    products, forward, again, positions = Counter[str](), Counter[Part](), Counter[Part](), set[int]()
    kept, attention = defaultdict[Kept, set[str]](set), set[str]()
    used, _ = dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars))  # as XLA runs it
    for equation, scopes, turns in operations(used):
        name, is_of_head = equation.primitive.name, HEAD in scopes
        is_forward = AGAIN not in scopes and "transpose(" not in scopes
        for what in get_args(Kept) if is_forward else ("ring",):
            if f"{KEEPS}{what}" in scopes or ALONE.get(name) == what:
                read = [] if what in READS_PRODUCTS else [x for x in equation.invars if x.aval.shape]
                dtypes = (value.aval.dtype for value in (*equation.outvars, *read))
                kept[what] |= {str(dtype) for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)}
        if is_forward and name.startswith(FUSED):
            attention.add(f"cudnn_{name}")
        elif is_forward and name == "exp" and f"{KEEPS}softmax" in scopes:
            rows, columns = equation.outvars[0].aval.shape[-2:]
            if columns > 1:  # a single column rescales sums over blocks
                attention.add(f"{rows} x {columns}")
        is_activation = name in GELUS or (name == "max" and RELU in scopes)
        if (name != PRODUCT and not is_activation) or f"{KEEPS}router" in scopes:
            continue
        part: Part = "activations" if is_activation else "logits" if is_of_head else "products"
        if name == PRODUCT:
            products[_dtype_of(equation)] += 1
        if AGAIN in scopes:
            again[part] += turns
        elif "transpose(" not in scopes:
            forward[part] += turns
            if part == "logits":
                positions.add(equation.invars[0].aval.shape[-2])
    if ticks and not ticks.kept_slots:  # backward begins with forward of its stage
        for part in ("products", "activations"):
            again[part] = forward[part] = forward[part] // 2
    return ObservedWork(
        products=dict(products),
        forward=dict(forward),
        again=dict(again),
        logits_positions=sorted(positions),
        kept={what: sorted(dtypes) for what, dtypes in kept.items()},
        attention=sorted(attention),
        rings=sorted({*rings_of(used)}),
        tasks=[_tasks_of(ticks, rank) for rank in range(ticks.ranks)] if ticks else [],
    )


def rings_of(jaxpr: Any, outer: str = "") -> Iterator[str]:
    """The order of hops and products (`ObservedWork.rings`) in each program that sends K, V around a ring.

    A hop is waited for where a product or another hop depends on it, at the latest at the program's end.
    """
    order, under_way, hops_before = "", set[int](), dict[Any, set[int]]()
    for number, equation in enumerate(jaxpr.eqns):
        scopes = f"{outer}/{equation.source_info.name_stack}"
        for inner in inner_programs(equation):
            yield from rings_of(inner, scopes)
        read = [x for x in equation.invars if not isinstance(x, Literal)]
        before = set[int]().union(*(hops_before.get(x, ()) for x in read))
        is_hop, is_product = equation.primitive.name == "ppermute" and KV_HOP in scopes, multiplies(equation)
        if is_hop or is_product:
            order += "w" * len(before & under_way) + ("h" if is_hop else "p")
            under_way -= before
        if is_hop:
            before = {number}
            under_way |= before
        hops_before |= dict.fromkeys(equation.outvars, before)
    if "h" in order:  # other layers multiply before and after the ring
        yield re.sub("p+", "p", order + "w" * len(under_way)).strip("p")


def multiplies(equation: Any) -> bool:
    """True for a matrix product, and for a loop, branch or call that has one."""
    inner = (each for program in inner_programs(equation) for each in program.eqns)
    return equation.primitive.name == PRODUCT or any(map(multiplies, inner))


def operations(jaxpr: Any, outer: str = "", turns: int = 1) -> Iterator[tuple[Any, str, int]]:
    """Equations of a program and of its inner programs, with their scopes and iteration counts."""
    for equation in jaxpr.eqns:
        scopes = f"{outer}/{equation.source_info.name_stack}"
        yield equation, scopes, turns
        turns_inside = turns * equation.params.get("length", 1)  # of a scan
        for inner in inner_programs(equation):
            yield from operations(inner, scopes, turns_inside)


def inner_programs(equation: Any) -> Iterator[Any]:
    """The programs of a loop, of the branches of a condition, or of a call."""
    for value in equation.params.values():
        for inner in value if isinstance(value, tuple | list) else [value]:
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield inner


def _tasks_of(ticks: Ticks, rank: int) -> list[str]:
    """The tasks of a rank, in order."""
    table = ticks.tasks.kind, ticks.tasks.stage, ticks.tasks.microbatch
    rows = zip(*(column[:, rank].tolist() for column in table), strict=True)
    return [str(Task(KINDS[kind], *of)) for kind, *of in rows if kind in KINDS]


def _dtype_of(product: Any) -> str:
    """The dtype of a product's operands. On a GPU the default for float32 is TF32."""
    dtype = str(product.invars[0].aval.dtype)
    precision = product.params["precision"]
    is_exact = precision is not None and set(precision) == {lax.Precision.HIGHEST}
    is_rounded = dtype == "float32" and not is_exact and jax.default_backend() == "gpu"
    return "tf32" if is_rounded else dtype
