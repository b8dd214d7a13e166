"""A GPT cut into the stages of a pipeline, from outside: names of parameters stay.

The first stage has the embeddings, the last one the final norm and the head, and blocks are split evenly. The
head is tied to the token embedding: the first and the last stage each have a copy of it, under one name.

B batch, T position, C embedding, V vocabulary.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from compare.contract.communication import TIED_GRADIENTS
from compare.spec.experiment import Layout
from torchpar.comm.collectives import Axis
from torchpar.model import GPT
from torchpar.parallel_model import ParallelModel, TensorsByName, local

TIED = "transformer.wte.weight"


class GPTStages(nn.Module):
    """The stages of a GPT that one rank has.

    Args:
        model: its modules are shared, not copied; dropping it frees those of other ranks' stages.
        own: numbers of its stages, along the model.
        stages: of the whole pipeline; divides the blocks.

    Attributes:
        stages: of the whole pipeline.
        blocks_of: the numbers of the blocks of each stage that this rank has.
        loss: from logits (N, V) and targets (N,) to their mean cross-entropy.
        width, dtype: of the residual stream: C, and the dtype of the weights.
    """

    def __init__(self, model: GPT, *, own: Iterable[int], stages: int):
        super().__init__()
        self.stages = stages
        share = len(model.blocks) // stages
        self.blocks_of = {stage: range(stage * share, (stage + 1) * share) for stage in own}
        is_first, is_last = 0 in self.blocks_of, stages - 1 in self.blocks_of
        numbers = [number for blocks in self.blocks_of.values() for number in blocks]
        have = {"wte": is_first or is_last, "wpe": is_first, "drop": is_first, "h": True, "ln_f": is_last}
        parts = {name: model.transformer[name] for name, is_here in have.items() if is_here}
        parts["h"] = nn.ModuleDict({str(number): model.blocks[number] for number in numbers})
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = model.lm_head if is_last else None
        self.loss = model.loss
        self.width, self.dtype = model.config.n_embd, model.lm_head.weight.dtype

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
        if stage == 0:
            position_T = torch.arange(x.shape[1], device=x.device)
            x = self.transformer["wte"](x) + self.transformer["wpe"](position_T)
            x = self.transformer["drop"](x, keys_B2)
        for number in self.blocks_of[stage]:
            x = self.get_submodule(f"transformer.h.{number}")(x, keys_B2)
        if stage < self.stages - 1:
            return x
        assert self.lm_head is not None
        return self.lm_head(self.transformer["ln_f"](x))

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


def cut(model: GPT, *, rank: int, layout: Layout) -> GPTStages:
    """The stages of one rank of the pipeline: with v chunks the stages rank, rank + pp, ..."""
    stages = layout.pp * layout.chunks
    return GPTStages(model, own=range(rank, stages, layout.pp), stages=stages)


def cut_each(model: GPT, *, rank: int, layout: Layout) -> dict[int, GPTStages]:
    """The same, each stage by itself."""
    stages = layout.pp * layout.chunks
    return {own: GPTStages(model, own=[own], stages=stages) for own in range(rank, stages, layout.pp)}


class OneStage(nn.Module):
    """One stage as a module of its own.

    Args:
        part: a `GPTStages`, or what a layout wrapped around it.
        stage: its number along the model.
    """

    def __init__(self, part: nn.Module, stage: int):
        super().__init__()
        self.part, self.stage = part, stage

    def forward(self, x: torch.Tensor, keys_B2: torch.Tensor | None = None) -> torch.Tensor:
        """x (B, T, C), or tokens (B, T) on the first stage -> the stage's output (B, T, C)."""
        return self.part(x, keys_B2, stage=self.stage)


def as_pipeline(
    parallel: ParallelModel,
    *,
    axis: Axis,
    run: Callable[..., torch.Tensor],
    evaluate: Callable[..., torch.Tensor],
) -> ParallelModel:
    """A rank's own stages, parallel over the other axes, as a part of the whole pipeline.

    Args:
        parallel: the rank's stages over the other axes; both copies of the tied weight are cut alike, so that
            pieces of their gradients can be added up.
        axis: the pipeline's ranks.
        run: see `ParallelModel.run_pipeline`.
        evaluate: see `ParallelModel.evaluate_pipeline`.
    """
    tied = parallel.parameters.get(TIED)
    ends = (0, axis.size - 1)

    def finish() -> None:
        parallel.finish_gradient_synchronization()
        if tied is not None:
            sum_tied_gradients(tied, axis, ranks=ends)

    return replace(
        parallel,
        run_pipeline=run,
        evaluate_pipeline=evaluate,
        finish_gradient_synchronization=finish,
        sharded_over=lambda name: (*parallel.sharded_over(name), axis),
        copies=frozenset({TIED} if axis.rank == axis.size - 1 else ()),
        gathers=(*parallel.gathers, partial(gather_stages, axis=axis)),
    )


def sum_tied_gradients(parameter: nn.Parameter, axis: Axis, *, ranks: tuple[int, int]) -> None:
    """Replace the gradients of a parameter's two copies, on two stages, by their sum, on both.

    The copies must have started equal; they then stay so to the last bit, as a + b is b + a.

    Args:
        parameter: this rank's copy, any shape; only the two ranks with a copy call.
        axis: of the pipeline.
        ranks: the two ranks of the axis with a copy.
    """
    assert parameter.grad is not None
    (other,) = set(ranks) - {axis.rank}
    gradient = local(parameter.grad)
    mine, theirs = gradient.contiguous(), torch.empty_like(gradient, memory_format=torch.contiguous_format)
    # In turn, one sending while the other receives: NCCL would deadlock if both sent first.
    exchanges = [
        lambda: axis.start_send(mine, to=other, purpose=TIED_GRADIENTS),
        lambda: axis.start_receive(theirs, source=other),
    ]
    for work in [start() for start in (exchanges if axis.rank == ranks[0] else exchanges[::-1])]:
        work.wait()
    gradient.add_(theirs)


def gather_stages(parts: TensorsByName, *, axis: Axis) -> TensorsByName:
    """The tensors of all stages by name, for the record.

    Of the tied weight it is the last stage's copy, whereas the first stage's counts in the norm: so both are
    seen.
    """
    stages = axis.all_gather_objects({name: tensor.cpu() for name, tensor in parts.items()})
    return {name: tensor for stage in stages for name, tensor in stage.items()}
