"""A GPT cut into the stages of a pipeline, from outside: names of parameters stay.

The first stage has the embeddings, the last one the final norm and the head, and blocks are split evenly. The
head is tied to the token embedding: the first and the last stage each have a copy of it, under one name.

B batch, T position, C embedding, V vocabulary.
"""

from collections.abc import Collection, Iterable
from functools import partial

import torch
from torch import nn

from compare.contract.communication import TIED_GRADIENTS
from compare.spec.experiment import Layout
from torchpar.comm.collectives import Axis
from torchpar.model import GPT, embedded, turn_at
from torchpar.sharding import Parameters, Sharding, TensorsByName, local

TIED = "transformer.wte.weight"


class GPTStages(nn.Module):
    """Of the `stages` of a GPT those that one rank has; `blocks_of` are numbers of their blocks, by stage.

    Modules are shared, not copied: dropping the model frees those of other ranks' stages.
    """

    def __init__(self, model: GPT, layout: Layout, own: Iterable[int]):
        super().__init__()
        self.stages = stages = layout.pp * layout.chunks
        share = len(model.blocks) // stages
        self.blocks_of = {stage: range(stage * share, (stage + 1) * share) for stage in own}
        is_first, is_last = 0 in self.blocks_of, stages - 1 in self.blocks_of
        numbers = [number for blocks in self.blocks_of.values() for number in blocks]
        have = {"wte": is_first or is_last, "wpe": is_first, "drop": is_first, "h": True, "ln_f": is_last}
        parts = {name: part for name, part in model.transformer.items() if have[name]}
        parts["h"] = nn.ModuleDict({str(number): model.blocks[number] for number in numbers})
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = model.lm_head if is_last else None
        self.loss, self.positions, self.turns = model.loss, model.positions, model.turns
        self._width, self._dtype = model.config.n_embd, model.lm_head.weight.dtype
        self._parts = layout.tp if layout.sequence_parallel else 1

    @property
    def blocks(self) -> list[nn.Module]:
        """This rank's blocks."""
        return [
            self.get_submodule(f"transformer.h.{n}") for blocks in self.blocks_of.values() for n in blocks
        ]

    def forward(
        self, x: torch.Tensor, keys_B2: torch.Tensor | None = None, *, stage: int | None = None
    ) -> torch.Tensor:
        """One stage: from token ids (B, T) or the stream (B, T, C) to the stream, or to logits (B, T, V).

        A rank that has one stage need not say which. The keys are for dropout, as `GPT` has it.
        """
        if stage is None:
            (stage,) = self.blocks_of
        length = x.shape[1] * (self._parts if stage else 1)
        position_T = self.positions(length, device=x.device)
        turn = turn_at(position_T, self.turns, self._dtype)
        if stage == 0:
            x = self.transformer["drop"](embedded(x, position_T, self.transformer), keys_B2)
        for number in self.blocks_of[stage]:
            x = self.get_submodule(f"transformer.h.{number}")(x, keys_B2, turn)
        if stage < self.stages - 1:
            return x
        assert self.lm_head is not None
        return self.lm_head(self.transformer["ln_f"](x))

    def empty_stream(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Memory for the residual stream of these ids, (B, T, C), or this rank's part of T."""
        rows, length = ids_BT.shape
        return torch.empty(rows, length // self._parts, self._width, dtype=self._dtype, device=ids_BT.device)

    def mean_loss(self, logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """The loss of the last stage's output, as the whole model computes it."""
        at_least_float32 = torch.promote_types(logits_BTV.dtype, torch.float32)  # autocast's are bfloat16
        return self.loss(logits_BTV.to(at_least_float32).flatten(0, 1), targets_BT.flatten())


def units_of(model: GPT | GPTStages) -> list[list[nn.Module]]:
    """Modules whose parameters are gathered together, where parameters are sharded.

    A block each; and in a whole model all that comes before and after them, because the tied weight is used
    at both ends. In a pipeline the tied weight is a unit of its own, so that both stages cut their copies
    alike; what else is at an end goes with the block next to it.
    """
    here = dict(model.named_modules(remove_duplicate=False))
    tied, first, last = (
        [here[path] for path in paths if path in here]
        for paths in (("transformer.wte", "lm_head"), ("transformer.wpe",), ("transformer.ln_f",))
    )
    blocks = [[block] for block in model.blocks]
    if isinstance(model, GPT):
        return [tied + first + last, *blocks]
    blocks[0] += first
    blocks[-1] += last
    return [tied, *blocks] if tied else blocks


def stages_of(layout: Layout, rank: int) -> range:
    """The stages of one rank of the pipeline: with v chunks the stages rank, rank + pp, ..."""
    return range(rank, layout.pp * layout.chunks, layout.pp)


def pipeline(axis: Axis, names: Collection[str]) -> Sharding:
    """Ranks with other stages each, this one with parameters of these names.

    Of the tied weight the first and the last have a copy, cut alike. The first one's counts in the norm, and
    the record shows the last one's: so both are seen.
    """

    def finish_gradients(parameters: Parameters) -> None:
        if TIED in parameters:
            sum_tied_gradients(parameters[TIED], axis)

    def gather(pieces: TensorsByName) -> TensorsByName:
        stages = axis.all_gather_objects({name: tensor.cpu() for name, tensor in pieces.items()})
        return {name: tensor for stage in stages for name, tensor in stage.items()}

    return Sharding(
        axes=dict.fromkeys(names, (axis,)),
        counted_elsewhere=frozenset({TIED} if axis.rank == axis.size - 1 else ()),
        finish_gradients=finish_gradients,
        gather=gather,
    )


def sum_tied_gradients(parameter: nn.Parameter, axis: Axis) -> None:
    """Replace the gradients of a parameter's two copies, at the ends of a pipeline, by their sum, on both.

    Only these two ranks call. Copies that started equal stay so to the last bit, as a + b is b + a.
    """
    assert parameter.grad is not None
    gradient, other = local(parameter.grad), axis.size - 1 - axis.rank
    mine, theirs = gradient.contiguous(), torch.empty_like(gradient, memory_format=torch.contiguous_format)
    send = partial(axis.start_send, mine, to=other, purpose=TIED_GRADIENTS)
    receive = partial(axis.start_receive, theirs, source=other)
    # One sends while the other receives: NCCL would deadlock if both sent first.
    for work in [begin() for begin in ((send, receive) if axis.rank == 0 else (receive, send))]:
        work.wait()
    gradient.add_(theirs)
