"""Pipeline parallelism by hand: ranks hold a share of the layers each, and microbatches pass through them.

A schedule is plain data (`compare.pipeline.schedules`): for each rank its tasks in order. So is the list of
instructions that a rank makes of it (`instructions`), sends and receives included. `run_pipeline` carries out
any such list for any modules (`stage`): data moves while the rank computes. Evaluation is a schedule without
backwards.

A passes, b rows of a rank, M microbatches of a step, B rows of one, T positions, C embedding.
Sources: GPipe (arXiv 1811.06965), 1F1B (2006.09503), interleaved (2104.04473), zero bubble (2401.10241).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from compare.contract.communication import ACTIVATIONS, LOSS
from compare.pipeline.schedules import forward_only, make_schedule
from compare.spec.experiment import Layout
from torchpar.comm.collectives import Axis, Work
from torchpar.gpt_stages import GPTStages, stage_modules
from torchpar.manual.instructions import (
    Backward,
    BackwardWeight,
    FinishReceive,
    Forward,
    Instruction,
    Message,
    Send,
    StartReceive,
    activation,
    gradient,
    make_instructions,
)
from torchpar.manual.stage import Stage
from torchpar.parallel_model import ParallelModel
from torchpar.run import RankBatch

Context = Callable[[], AbstractContextManager]


def run_pipeline(
    instructions: Iterable[Instruction],
    stages: Mapping[int, Stage],
    axis: Axis,
    inputs: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    *,
    last_stage: int,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    boundary: Callable[[int, torch.Tensor], torch.Tensor],
    also: Sequence[Sequence[torch.Tensor]] = (),
    forward_context: Context = nullcontext,
    no_sync: Context = nullcontext,
) -> torch.Tensor:
    """Carry out a rank's instructions of one step, in order: adds the gradients of the mean loss.

    Args:
        instructions: from `make_instructions`.
        stages: this rank's, by number along the model.
        axis: the ranks.
        inputs: of each microbatch; on all ranks, which at least learn shapes from them.
        targets: of each microbatch; only the last stage looks at them.
        last_stage: its number.
        loss: from the last stage's output and a microbatch's targets to their mean loss, a scalar.
        boundary: from a stage's number and a microbatch's inputs to a tensor on the device "meta" that is
            like the stage's output: how others know what to receive.
        also: of each microbatch, what every stage's module takes after its input: no gradients go there.
        forward_context: made anew around every forward, such as autocast.
        no_sync: around every backward but each stage's last.

    Returns:
        The mean loss, a scalar, the same on all ranks.
    """
    mail: dict[Message, Any] = {activation(0, m): x for m, x in enumerate(inputs) if 0 in stages}
    receiving: dict[Message, Work] = {}
    sending: dict[Message, Work] = {}

    def finish(stage: int, m: int, y: torch.Tensor) -> torch.Tensor:
        return loss(y, targets[m]) / len(inputs) if stage == last_stage else y

    for instruction in instructions:
        match instruction:
            case StartReceive(message, source):
                sender = message.stage - (message.what == ACTIVATIONS)  # a gradient is like what it is of
                like = boundary(sender, inputs[message.microbatch])
                mail[message] = torch.empty_like(like, device=inputs[0].device)
                receiving[message] = axis.start_receive(mail[message], source=source)
            case FinishReceive(message, arrived):
                receiving.pop(message).wait()
                for earlier in arrived:
                    sending.pop(earlier).wait()  # returns at once
                    del mail[earlier]  # and nothing keeps it any longer
            case Forward(stage, m):
                x, others = mail.pop(activation(stage, m)), also[m] if also else ()
                with forward_context():
                    y = stages[stage].forward(m, x, *others, finish=partial(finish, stage, m))
                mail[activation(stage + 1, m)] = y.contiguous()
            case Backward(stage, m, is_last):
                of_y = None if stage == last_stage else mail.pop(gradient(stage, m))
                with nullcontext() if is_last else no_sync():
                    of_x = stages[stage].backward(m, of_y)
                if of_x is not None:  # tokens have none
                    mail[gradient(stage - 1, m)] = of_x.contiguous()
            case BackwardWeight(stage, m):
                with no_sync():
                    stages[stage].backward_weight(m)
            case Send(message, to):
                sending[message] = axis.start_send(mail[message], to=to, purpose=message.what)
    for message, work in sending.items():
        work.wait()
        del mail[message]
    total = torch.zeros((), dtype=torch.float64, device=inputs[0].device)  # whatever the loss has fits
    for share in mail.values():  # what the last stage leaves
        total += share
    axis.all_reduce(total, purpose=LOSS)
    return total


def run_stages(part: GPTStages, parallel: ParallelModel, axis: Axis, layout: Layout) -> ParallelModel:
    """A rank's stages of a GPT, parallel over the other axes, run by the layout's schedule.

    Args:
        part: the stages, which `parallel.module` is, or wraps.
        parallel: these.
        axis: the pipeline's ranks; rank r of p has the stages r, r + p, ...
        layout: schedule, chunks and microbatches.
    """
    halves = layout.schedule == "zero_bubble"
    stages = {
        number: Stage(module, splits_backward=halves, number=number)
        for number, module in stage_modules(parallel.module, part).items()
    }

    @cache
    def instructions(microbatches: int, *, evaluates: bool) -> list[Instruction]:
        options = {"ranks": axis.size, "microbatches": microbatches, "chunks": layout.chunks}
        schedule = forward_only(**options) if evaluates else make_schedule(layout.schedule, **options)
        return make_instructions(schedule, axis.rank)

    def boundary(stage: int, ids_BT: torch.Tensor) -> torch.Tensor:
        """The residual stream (B, T, C) behind a stage, without data."""
        rows, length = ids_BT.shape
        length //= layout.tp if layout.sequence_parallel else 1
        return torch.empty(rows, length, part.width, dtype=part.dtype, device="meta")

    def run(batch: RankBatch, forward_context: Context) -> torch.Tensor:
        """(A, b, T) in microbatches (B, T), to the mean loss, ()."""
        size = batch.inputs_ABT.shape[1] // layout.microbatches
        inputs, targets, *keys = (t.flatten(0, 1).split(size) for t in batch if t is not None)
        return run_pipeline(
            instructions(len(inputs), evaluates=not torch.is_grad_enabled()),
            stages,
            axis,
            inputs,
            targets,
            last_stage=part.stages - 1,
            loss=part.mean_loss,
            boundary=boundary,
            also=list(zip(*keys, strict=True)),
            forward_context=forward_context,
            no_sync=parallel.no_sync,
        )

    return replace(parallel, run_pipeline=run)
