"""The stages of a pipeline that one rank has of a GPT. Names of parameters stay.

The first stage has the embeddings, the last stage the final norm and the head, and the blocks are divided
evenly. The head is tied to the token embedding: see `tied_weights`.

B batch, T position, C embedding, V vocabulary.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from compare.spec.experiment import Layout
from torchpar.model import GPT, embed_tokens, turn_at


class GPTStages(nn.Module):
    """Some of a GPT's stages. Modules are shared with the GPT, not copied.

    Attributes:
        stages: how many stages the GPT has.
        blocks_of: by stage of this rank, the numbers of its blocks.
        forward_context: entered around each forward and loss, such as autocast.
    """

    def __init__(self, model: GPT, layout: Layout, numbers: Iterable[int]):
        """Take the stages with these numbers along the model."""
        super().__init__()
        self.stages = stages = layout.pp * layout.chunks
        count = len(model.blocks) // stages
        self.blocks_of = {stage: range(stage * count, (stage + 1) * count) for stage in numbers}
        is_first, is_last = 0 in self.blocks_of, stages - 1 in self.blocks_of
        has = {"wte": is_first or is_last, "wpe": is_first, "drop": is_first, "h": True, "ln_f": is_last}
        modules = {name: module for name, module in model.transformer.items() if has[name]}
        blocks = [block for blocks in self.blocks_of.values() for block in blocks]
        modules["h"] = nn.ModuleDict({str(block): model.blocks[block] for block in blocks})
        self.transformer = nn.ModuleDict(modules)
        self.lm_head = model.lm_head if is_last else None
        self.loss, self.positions, self.turns = model.loss, model.positions, model.turns
        self.forward_context: Callable[[], AbstractContextManager] = nullcontext
        self._width, self._dtype = model.config.n_embd, model.lm_head.weight.dtype
        self._sequence_ranks = layout.tp if layout.sequence_parallel else 1

    @property
    def blocks(self) -> list[nn.Module]:
        """This rank's blocks."""
        return [
            self.get_submodule(f"transformer.h.{n}") for blocks in self.blocks_of.values() for n in blocks
        ]

    def forward(
        self, x: torch.Tensor, keys_B2: torch.Tensor | None = None, *, stage: int | None = None
    ) -> torch.Tensor:
        """Run one stage: token ids (B, T) or the stream (B, T, C), to the stream or to logits (B, T, V).

        `stage` is required if there are several. The keys are for dropout, as in `GPT`.
        """
        if stage is None:
            (stage,) = self.blocks_of
        with self.forward_context():
            position_T = self.positions(x.shape[1] * (self._sequence_ranks if stage else 1), device=x.device)
            turn = turn_at(position_T, self.turns, self._dtype)
            if stage == 0:
                x = self.transformer["drop"](embed_tokens(x, position_T, self.transformer), keys_B2)
            for block in self.blocks_of[stage]:
                x = self.get_submodule(f"transformer.h.{block}")(x, keys_B2, turn)
            if stage < self.stages - 1:
                return x
            assert self.lm_head is not None
            return self.lm_head(self.transformer["ln_f"](x))

    def empty_stream(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Memory for the residual stream of these ids, (B, T, C); with sequence parallelism this rank's T."""
        rows, length = ids_BT.shape
        shape = rows, length // self._sequence_ranks, self._width
        return torch.empty(shape, dtype=self._dtype, device=ids_BT.device)

    def mean_loss(self, logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """The loss of the last stage's output, as the whole model computes it: in float32 at least."""
        with self.forward_context():
            logits_BTV = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))
            return self.loss(logits_BTV.flatten(0, 1), targets_BT.flatten())


def stages_of(layout: Layout, rank: int) -> range:
    """The stages of one rank of the pipeline: with v chunks the stages rank, rank + pp, ..."""
    return range(rank, layout.pp * layout.chunks, layout.pp)
