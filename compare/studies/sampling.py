"""`shardpair sample`: text from a checkpoint, drawn by one framework or by each."""

import sys
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from compare.execute.ask import ask
from compare.execute.launch import child_environment
from compare.numerics.sampling import SampleRequest
from compare.spec.engines.registry import SIDES
from compare.studies.tokens import Alphabet


class Sampled(Struct, frozen=True, kw_only=True):
    """What the sides drew."""

    request: SampleRequest
    tokens: dict[str, list[list[int]]]
    """By side: the token ids of each sample, the prompt among them."""
    texts: dict[str, list[str]] = {}
    """The same as text; {} where nobody knows how it is written."""

    @property
    def is_same(self) -> bool:
        """True if all sides drew the same."""
        return len({msgspec.json.encode(drawn) for drawn in self.tokens.values()}) == 1


def draw(
    request: SampleRequest,
    sides: list[str],
    alphabet: Alphabet | None,
    *,
    pythons: Mapping[str, str],
    timeout_s: float,
) -> Sampled:
    """Have each side draw the same request.

    Raises:
        EnvironmentMissing: a side cannot, and why.
    """
    tokens = {}
    for side in sides:
        tokens[side] = ask(
            side,
            pythons.get(side, sys.executable),
            ["--sample", msgspec.json.encode(request).decode()],
            answer=list[list[int]],
            environment=child_environment(SIDES[side], "cpu"),
            timeout_s=timeout_s,
        )
    decode = alphabet.decode if alphabet else None
    texts = {side: [decode(drawn) for drawn in found] for side, found in tokens.items()} if decode else {}
    return Sampled(request=request, tokens=tokens, texts=texts)
