"""`shardpair sample`: text from a checkpoint."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import tyro
from msgspec import Struct

from compare.checkpoint.reader import CheckpointReader
from compare.commands.convert import as_checkpoint
from compare.execute.ask import ask
from compare.flags import SidePythons, checked_pythons
from compare.numerics.sampling import SampleRequest
from compare.spec.engines.registry import REFERENCE, SIDES, side_of
from compare.spec.experiment import Experiment, ExperimentError
from compare.studies.tokens import Alphabet, alphabet_of
from compare.terminal import print_json, results_console

if TYPE_CHECKING:
    SideName = str
else:
    SideName = Literal[tuple(SIDES)]


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


class Sample(SidePythons, frozen=True, kw_only=True):
    """Draw text from a checkpoint, in PyTorch, in JAX, or in both: with the same seed it is the same text.

    Try:
      shardpair sample runs/demo-20260101-120000/torch-manual --prompt "def "
      shardpair sample out/ckpt.pt --temperature 0 --samples 3
    """

    source: Annotated[Path, tyro.conf.Positional]
    """A checkpoint, or the folder of an engine's run, whose newest is taken; or what `shardpair convert`
    reads: nanoGPT's ckpt.pt, Hugging Face's GPT-2, an orbax checkpoint."""
    prompt: str = "\n"
    """Text to begin with. It is written as the data was: bytes, nanoGPT's characters, or GPT-2's tokens (with
    tiktoken)."""
    prompt_tokens: tuple[int, ...] = ()
    """Token ids to begin with, instead of text."""
    tokens: int = 200
    """How many tokens to draw."""
    samples: int = 1
    """How many texts."""
    temperature: float = 0.8
    """Divides the logits; 0 takes the likeliest token every time."""
    top_k: int = 200
    """Only so many of the likeliest tokens are drawn from; 0 for all."""
    seed: int = 1337
    """Of the uniform numbers that decide."""
    meta: Path | None = None
    """nanoGPT's meta.pkl, which says what its characters are; by default the one beside the data. Nothing in
    it is executed."""
    sides: tuple[SideName, ...] = (side_of(REFERENCE).name,)
    """Who draws; with several it is compared."""
    timeout_s: float = 600.0
    """Seconds until a side must have drawn everything."""
    json: bool = False
    """Print what was drawn as one JSON object on stdout."""

    def __call__(self, default: Experiment) -> int:
        """Draw. Returns the exit code: 0, or 1 if the sides drew different texts."""
        pythons = checked_pythons(self)
        with tempfile.TemporaryDirectory() as scratch:
            folder = as_checkpoint(self.source, Path(scratch) / "made", Experiment(), pythons=pythons)
            reader = CheckpointReader(folder)
            reader.verify()
            experiment = reader.description.experiment
            alphabet = None if self.prompt_tokens else alphabet_of(experiment, meta=self.meta)
            request = self._request(folder, experiment, alphabet)
            drawn = {side: self._drawn(side, request, pythons[side]) for side in self.sides}
        decode = alphabet.decode if alphabet else None
        texts = {side: [decode(ids) for ids in drawn[side]] for side in drawn} if decode else {}
        sampled = Sampled(request=request, tokens=drawn, texts=texts)
        self._print(sampled)
        return 0 if sampled.is_same else 1

    def _request(self, folder: Path, experiment: Experiment, alphabet: Alphabet | None) -> SampleRequest:
        prompt = alphabet.encode(self.prompt) if alphabet else list(self.prompt_tokens)
        if not prompt:
            raise ExperimentError("--prompt is empty: give at least one token to begin with")
        vocab = experiment.model.vocab_size
        if bad := [token for token in prompt if not 0 <= token < vocab]:
            raise ExperimentError(f"--prompt: token {bad[0]}: the model has 0 to {vocab - 1}")
        fields = {
            "checkpoint": str(folder.absolute()),
            "prompt": prompt,
            "samples": self.samples,
            "tokens": self.tokens,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "seed": self.seed,
        }
        try:
            return msgspec.convert(fields, SampleRequest)
        except msgspec.ValidationError as error:
            raise ExperimentError(str(error).replace("`$.", "`--")) from None

    def _drawn(self, side: str, request: SampleRequest, python: str) -> list[list[int]]:
        """What one side draws. Raises EnvironmentMissing: it cannot, and why."""
        return ask(
            side,
            python,
            ["--sample", msgspec.json.encode(request).decode()],
            answer=list[list[int]],
            timeout_s=self.timeout_s,
        )

    def _print(self, sampled: Sampled) -> None:
        if self.json:
            print_json(sampled)
            return
        console = results_console()
        shown = sampled.texts or {
            side: [" ".join(map(str, drawn)) for drawn in found] for side, found in sampled.tokens.items()
        }
        first, *others = shown
        for text in shown[first]:
            console.print(text, soft_wrap=True, end="\n---\n")
        if others and sampled.is_same:
            console.print(f"{first} and {', '.join(others)} drew the same", soft_wrap=True)
        for side in others:
            if sampled.tokens[side] != sampled.tokens[first]:
                console.print(f"{side} drew something else:", style="red")
                for text in shown[side]:
                    console.print(text, soft_wrap=True, end="\n---\n")
