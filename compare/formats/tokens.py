"""Text to token ids and back: bytes, nanoGPT's characters, or GPT-2's pieces of words."""

import io
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from compare.spec.experiment import Experiment, ExperimentError
from compare.system.disk import why_not_readable

META = "meta.pkl"
BYTES = 256
GPT2_TOKENS = 50257


class Alphabet(Struct, frozen=True):
    """One way of writing text as tokens."""

    encode: Callable[[str], list[int]]
    """Raises ExperimentError for a character without a token."""
    decode: Callable[[list[int]], str]


def alphabet_of(experiment: Experiment, *, meta: Path | None = None) -> Alphabet:
    """Alphabet of an experiment's data; `meta` is nanoGPT's meta.pkl, by default the file next to the data.

    Raises ExperimentError.
    """
    beside = Path(experiment.data.source) / META
    if meta or beside.is_file():
        return _characters(meta or beside)
    if experiment.model.vocab_size >= GPT2_TOKENS:
        return _gpt2()
    if experiment.model.vocab_size == BYTES:
        return Alphabet(
            encode=lambda text: list(text.encode()),
            decode=lambda tokens: bytes(tokens).decode(errors="replace"),
        )
    raise ExperimentError(
        f"model.vocab_size = {experiment.model.vocab_size}: no alphabet has this size: give "
        f"nanoGPT's meta.pkl with --meta, or token ids with --prompt_tokens"
    )


def alphabet_size(meta: Path) -> int:
    """The `vocab_size` of a meta.pkl, which nanoGPT's train.py reads; without one, its number of characters.

    Raises ExperimentError.
    """
    found = _plain(meta)
    size = found.get("vocab_size", len(found.get("stoi", ())))
    if not isinstance(size, int) or size < 1:
        raise ExperimentError(f"{meta} is not a meta.pkl of nanoGPT: it has no vocab_size")
    return size


def _characters(path: Path) -> Alphabet:
    """nanoGPT's character-level data: `stoi` of a meta.pkl has the number of every character."""
    plain = _plain(path)
    try:
        numbers = {str(character): int(number) for character, number in plain["stoi"].items()}
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        why = f"it has no stoi, the number of each character ({error})"
        raise ExperimentError(f"{path} is not a meta.pkl of nanoGPT: {why}") from None
    characters = {number: character for character, number in numbers.items()}

    def encode(text: str) -> list[int]:
        if unknown := sorted(set(text) - numbers.keys()):
            raise ExperimentError(f"{path} has no token for {unknown[0]!r}: write the prompt without it")
        return [numbers[character] for character in text]

    return Alphabet(encode, lambda tokens: "".join(characters.get(token, "\ufffd") for token in tokens))


def _plain(path: Path) -> dict[Any, Any]:
    """A meta.pkl: dicts of text and numbers."""
    if why := why_not_readable(path):
        raise ExperimentError(f"{path} {why}")
    try:
        content = path.read_bytes()
        for opcode, _, _ in pickletools.genops(content):
            if any(word in opcode.name for word in _NOT_PLAIN):
                raise pickle.UnpicklingError("it has more than dicts, lists, text and numbers")
        found = _PlainUnpickler(io.BytesIO(content)).load()
        if not isinstance(found, dict):
            raise pickle.UnpicklingError("it is not a dict")
        return found
    except Exception as error:  # a pickle can go wrong in any way
        why = " ".join(str(error).split()) or type(error).__name__
        raise ExperimentError(f"{path} is not a meta.pkl of nanoGPT: {why}") from None


_NOT_PLAIN = ("TUPLE", "EMPTY_SET", "FROZENSET", "GLOBAL", "REDUCE", "BUILD", "INST", "OBJ", "PERSID", "EXT")
"""Parts of opcodes' names. A key of nested tuples would be hashed level by level, to the end of the stack."""


class _PlainUnpickler(pickle.Unpickler):
    """No name is ever looked up, so that nothing can be called."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and only plain values are read")


def _gpt2() -> Alphabet:
    try:
        import tiktoken
    except ImportError:
        raise ExperimentError(
            "GPT-2's tokens need tiktoken: pip install 'shardpair[gpt2]'; or give token ids with "
            "--prompt_tokens"
        ) from None
    encoding = tiktoken.get_encoding("gpt2")
    return Alphabet(
        encode=lambda text: encoding.encode(text, allowed_special={"<|endoftext|>"}),
        decode=lambda tokens: encoding.decode([t for t in tokens if t < GPT2_TOKENS]),
    )
