"""`shardpair sample`: text from a checkpoint."""

import tempfile
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import tyro

from compare.execute.query import query
from compare.flags import AsJson, SidePythons, find_pythons
from compare.formats.tokens import Alphabet, alphabet_of
from compare.numerics.sampling import SampleRequest
from compare.setup.sources import as_checkpoint
from compare.show.envelope import Envelope
from compare.spec.experiment import ExperimentError
from compare.terminal import print_json, results_console


class Sample(SidePythons, frozen=True, kw_only=True):
    """Draw text from a checkpoint, in PyTorch, JAX or both. The same seed gives the same text.

    Try:
      shardpair sample runs/demo-20260101-120000/torch-manual --prompt "def "
      shardpair sample out/ckpt.pt --temperature 0 --samples 3
    """

    source: Annotated[Path, tyro.conf.Positional]
    """A checkpoint; the folder of an engine's run, with its newest checkpoint; or a source of `shardpair
    convert`: nanoGPT's ckpt.pt, Hugging Face's GPT-2, an orbax checkpoint."""
    prompt: str = "\n"
    """Text to begin with, encoded like the data: bytes, nanoGPT's characters, or GPT-2's tokens (with
    tiktoken)."""
    prompt_tokens: tuple[int, ...] = ()
    """Token ids to begin with, instead of text."""
    tokens: int = 200
    """Number of tokens of each text."""
    samples: int = 1
    """Number of texts."""
    temperature: float = 0.8
    """Divisor of the logits; 0 always takes the likeliest token."""
    top_k: int = 200
    """Number of likeliest tokens to draw from; 0 for all."""
    seed: int = 1337
    """Random seed."""
    meta: Path | None = None
    """nanoGPT's meta.pkl with its characters. Default: the file in the folder of the data. Nothing in it is
    executed."""
    sides: tuple[Literal["jaxpar", "torchpar"], ...] = ("torchpar",)
    """Sides that sample; the texts of two sides are compared."""
    timeout_s: float = 600.0
    """Seconds after which a side is ended."""
    json: AsJson = False

    def __call__(self) -> int:
        """Draw. Returns 0, or 1 if the sides drew different texts."""
        pythons = find_pythons(self)
        with tempfile.TemporaryDirectory() as scratch:
            reader = as_checkpoint(self.source, Path(scratch) / "made", pythons=pythons)
            experiment = reader.description.experiment
            alphabet = None if self.prompt_tokens else alphabet_of(experiment, meta=self.meta)
            request = self._request(reader.folder, experiment.model.vocab_size, alphabet)
            question, answer = ["--sample", msgspec.json.encode(request).decode()], list[list[int]]
            drawn = {
                side: query(side, pythons[side], question, answer=answer, timeout_s=self.timeout_s)
                for side in self.sides
            }
        spelled = alphabet.decode if alphabet else lambda tokens: " ".join(map(str, tokens))
        texts = {side: [spelled(tokens) for tokens in samples] for side, samples in drawn.items()}
        first, *others = drawn
        different = [side for side in others if drawn[side] != drawn[first]]
        if self.json:
            counts = f"{self.samples} texts of {self.tokens} tokens"
            verdict = f"{', '.join(different)} drew something else than {first}" if different else counts
            values = {"request": request, "tokens": drawn, "texts": texts}
            print_json(Envelope(study="sample", passed=not different, verdict=verdict, values=values))
            return 1 if different else 0
        console = results_console()
        for side in (first, *different):
            if side != first:
                console.print(f"{side} drew something else:", style="red")
            for text in texts[side]:
                console.print(text, soft_wrap=True, end="\n---\n")
        if others and not different:
            console.print(f"{first} and {', '.join(others)} drew the same", soft_wrap=True)
        return 1 if different else 0

    def _request(self, folder: Path, vocab_size: int, alphabet: Alphabet | None) -> SampleRequest:
        prompt = alphabet.encode(self.prompt) if alphabet else list(self.prompt_tokens)
        if not prompt:
            raise ExperimentError("--prompt is empty: give at least one token to begin with")
        if bad := [token for token in prompt if not 0 <= token < vocab_size]:
            raise ExperimentError(f"--prompt: token {bad[0]}: the model has 0 to {vocab_size - 1}")
        fields = {"checkpoint": str(folder.absolute()), "prompt": prompt}
        flags = {name: getattr(self, name) for name in SampleRequest.__struct_fields__ if name not in fields}
        try:
            return msgspec.convert(flags | fields, SampleRequest)
        except msgspec.ValidationError as error:
            raise ExperimentError(str(error).replace("`$.", "`--")) from None
