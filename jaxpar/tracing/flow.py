"""Flow of data in a traced function: labels that inputs carry, as far as its outputs.

A function is traced with `clears` and `adds` in the places of interest, both of which do nothing to the
numbers; `labels_reaching` then reads the jaxpr. What it does not know it takes for passing everything on.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

Label = tuple[str, str]
"""(kind, whose)."""
Labels = frozenset[Label]
NOTHING: Labels = frozenset()
_CLEARS, _ADDS, _BETWEEN = "flow clears", "flow adds", "\0"


def clears(x: jax.Array, kind: str) -> jax.Array:
    """x, any shape, without its labels of this kind."""
    return checkpoint_name(x, _BETWEEN.join((_CLEARS, kind)))


def adds(x: jax.Array, label: Label) -> jax.Array:
    """x, any shape, with one label more."""
    return checkpoint_name(x, _BETWEEN.join((_ADDS, *label)))


def labels_reaching(traced: ClosedJaxpr, inputs: Sequence[Labels]) -> Labels:
    """The labels that reach any output.

    Args:
        traced: from `jax.make_jaxpr`.
        inputs: the labels of each of its inputs.
    """
    return NOTHING.union(*labels_by_output(traced, inputs))


def labels_by_output(traced: ClosedJaxpr, inputs: Sequence[Labels]) -> list[Labels]:
    """The labels that reach each output. Arguments as of `labels_reaching`."""
    return _through_jaxpr(traced.jaxpr, inputs)


def _through_jaxpr(jaxpr: Jaxpr, inputs: Sequence[Labels]) -> list[Labels]:
    known: dict[Any, Labels] = dict(zip(jaxpr.invars, inputs, strict=True))

    def of(variables: Sequence[Any]) -> list[Labels]:
        return [NOTHING if isinstance(v, Literal) else known.get(v, NOTHING) for v in variables]

    for equation in jaxpr.eqns:
        known.update(zip(equation.outvars, _through(equation, of(equation.invars)), strict=True))
    return of(jaxpr.outvars)


def _through(equation: JaxprEqn, inputs: list[Labels]) -> list[Labels]:
    """The labels of an equation's outputs."""
    kind, parameters = equation.primitive.name, equation.params
    if kind == "name":
        return [_marked(parameters["name"], *inputs)]
    if kind == "scan":
        return _through_loop(parameters["jaxpr"], inputs, *_consts_and_carried(parameters))
    if kind == "while":
        start, consts = parameters["cond_nconsts"], parameters["body_nconsts"]
        condition = NOTHING.union(*inputs[:start], *inputs[start + consts :])
        carried = len(inputs) - start - consts
        return [
            o | condition for o in _through_loop(parameters["body_jaxpr"], inputs[start:], consts, carried)
        ]
    if kind == "cond":
        branches = [_through_jaxpr(_open(branch), inputs[1:]) for branch in parameters["branches"]]
        return [inputs[0].union(*outputs) for outputs in zip(*branches, strict=True)]
    inner = [_open(value) for value in parameters.values() if isinstance(value, Jaxpr | ClosedJaxpr)]
    if len(inner) == 1 and len(inner[0].invars) == len(inputs):
        outputs = _through_jaxpr(inner[0], inputs)
        if len(outputs) == len(equation.outvars):
            return outputs
    return [NOTHING.union(*inputs)] * len(equation.outvars)


def _consts_and_carried(scan: dict[str, Any]) -> tuple[int, int]:
    """How many inputs of a scan are constants, and how many its carry has; the rest are slices."""
    if "num_consts" in scan:
        return scan["num_consts"], scan["num_carry"]
    consts, carry, _ = scan["ft_in"].unpack()  # from jax 0.11.2 on
    return len(consts.vals), len(carry.vals)


def _marked(name: str, labels: Labels) -> Labels:
    what, *rest = name.split(_BETWEEN)
    if what == _CLEARS:
        return frozenset(label for label in labels if label[0] != rest[0])
    return labels | {(rest[0], rest[1])} if what == _ADDS else labels


def _through_loop(body: ClosedJaxpr, inputs: list[Labels], consts: int, carried: int) -> list[Labels]:
    """A loop over (consts, carry, slices) -> (carry, slices), until the carry gains no more labels."""
    while True:
        outputs = _through_jaxpr(_open(body), inputs)
        carry = inputs[consts : consts + carried]
        grown = [before | after for before, after in zip(carry, outputs[:carried], strict=True)]
        if grown == carry:
            return [*carry, *outputs[carried:]]
        inputs = [*inputs[:consts], *grown, *inputs[consts + carried :]]


def _open(jaxpr: Any) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
