"""Tasks of each device of the pipeline by tick, for a timeline: the ticks are those of jax-compiler."""

from jaxpar.compiler.turns import make_turns

__all__ = ["make_turns"]
