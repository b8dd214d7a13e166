"""Labels through traced functions: JAX's control flow passes on what it passes on, and no more."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxpar.tracing.flow import adds, clears, labels_reaching

A, B = ("kind", "a"), ("kind", "b")


def through_scan_carry(a, b):
    """b reaches the carry one turn after a does."""
    return lax.scan(lambda carry, _: ((carry[1], a), None), (a * 0, b), length=3)[0][0]


def through_scan_slices(a, b):
    return lax.scan(lambda x, w: (x, w * clears(x, "kind")), a, jnp.stack([b, b]))[1]


def by_a_while_condition(a, b):
    return lax.while_loop(lambda x: x < a, lambda x: x + 1, clears(b, "kind"))


def in_one_branch(a, b):
    return lax.cond(jnp.bool_(True), lambda a, b: a, lambda a, b: clears(b, "kind"), a, b)


def by_a_predicate(a, b):
    return lax.cond(a > 0, lambda b: 1.0, lambda b: 2.0, b)


def inside_jit_and_remat(a, b):
    return jax.jit(jax.checkpoint(lambda a, b: clears(a, "kind") + b))(a, b)


@jax.custom_vjp
def with_a_rule(a, b):
    return clears(a, "kind") * b


with_a_rule.defvjp(lambda a, b: (a * b, None), lambda _, g: (g, g))


def of_another_kind(a, b):
    return clears(a, "other") + adds(clears(b, "kind"), ("kind", "b"))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (through_scan_carry, {A, B}),
        (through_scan_slices, {B}),
        (by_a_while_condition, {A}),
        (in_one_branch, {A}),
        (by_a_predicate, {A}),
        (inside_jit_and_remat, {B}),
        (with_a_rule, {B}),
        (of_another_kind, {A, B}),
        (lambda a, b: jnp.zeros(3), set()),
        (lambda a, b: lax.sort((a[None], b[None]))[0], {A, B}),  # nothing known of it: everything
    ],
)
def test_labels_reach_what_depends_on_them(function, expected):
    traced = jax.make_jaxpr(function)(1.0, 2.0)
    assert labels_reaching(traced, [frozenset({A}), frozenset({B})]) == expected
