"""Pipeline parallelism by hand: ranks hold a share of the layers each, and microbatches pass through them.

A schedule is plain data (`compare.pipeline.schedules`): for each rank its tasks in order. So is the list of
instructions that a rank makes of it (`instructions`), sends and receives included. `run_pipeline` carries out
any such list for any modules (`stage`): data moves while the rank computes. Evaluation is a schedule without
backwards.

A passes, b rows of a rank, M microbatches of a step, B rows of one, T positions, C embedding.
Sources: GPipe (arXiv 1811.06965), 1F1B (2006.09503), interleaved (2104.04473), zero bubble (2401.10241).
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from compare.contract.communication import ACTIVATIONS, LOSS
from compare.pipeline.schedules import Kind, Schedule, forward_only, make_schedule
from compare.spec.experiment import Layout
from torchpar.comm.collectives import Axis, ProcessGroup, Work
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
    mail: dict[Message, Any],
    axis: Axis,
    *,
    empty: Callable[[Message], torch.Tensor],
    finish: Callable[[int, int, torch.Tensor], torch.Tensor] = lambda stage, microbatch, y: y,
    also: Sequence[Sequence[torch.Tensor]] = (),
    forward_context: Context = nullcontext,
    no_sync: Context = nullcontext,
) -> None:
    """Carry out a rank's instructions of one step, in order.

    Args:
        instructions: from `make_instructions`.
        stages: this rank's, by number along the model.
        mail: tensors that wait for a stage of this rank, or to be sent: at first what the first stage takes
            and None as the gradient of a loss, at last what the last stage leaves.
        axis: the ranks.
        empty: makes a tensor to receive a message into.
        finish: from a stage's number, a microbatch and its module's output to the stage's output.
        also: further inputs of every module, (B, ...), by microbatch.
        forward_context: around every forward.
        no_sync: around every backward but each stage's last.
    """
    receiving: dict[Message, Work] = {}
    sending: dict[Message, Work] = {}
    for instruction in instructions:
        match instruction:
            case StartReceive(message, source):
                mail[message] = empty(message)
                receiving[message] = axis.start_receive(mail[message], source=source)
            case FinishReceive(message, arrived):
                receiving.pop(message).wait()
                for earlier in arrived:
                    sending.pop(earlier).wait()  # returns at once
                    del mail[earlier]  # and nothing keeps it any longer
            case Forward(stage, m):
                inputs = (mail.pop(activation(stage, m)), *(also[m] if also else ()))
                with forward_context():
                    y = stages[stage].forward(m, *inputs, finish=functools.partial(finish, stage, m))
                mail[activation(stage + 1, m)] = y.contiguous()
            case Backward(stage, m, is_last):
                with nullcontext() if is_last else no_sync():
                    of_x = stages[stage].backward(m, mail.pop(gradient(stage, m)))
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


class PipelineParallel:
    """The stages of one rank, and the schedule that takes microbatches through them.

    Args:
        stages: this rank's modules by their number along the model; rank r of p has the stages r, r + p, ...
            Each takes one tensor and returns one: a microbatch's inputs on the first stage.
        count: of all stages.
        schedule: of all ranks, for a number of microbatches.
        loss: from the last stage's output and a microbatch's targets to their mean loss, a scalar.
        boundary: from a stage's number and a microbatch's inputs to a tensor on the device "meta" that is
            like the stage's output: how others know what to receive.
        group: the ranks: an Axis, a torch ProcessGroup, or None for all.
        no_sync: a context for every backward but each stage's last, or for all if the schedule has it in
            two halves: see DataParallel. Gradients are complete after `finish_gradient_synchronization`.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        *,
        count: int,
        schedule: Callable[[int], Schedule],
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        boundary: Callable[[int, torch.Tensor], torch.Tensor],
        group: Axis | ProcessGroup | None = None,
        no_sync: Context = nullcontext,
    ):
        self._axis, self._last_stage, self._schedule = Axis.of(group), count - 1, schedule
        self._loss, self._boundary, self._no_sync = loss, boundary, no_sync
        has_halves = any(task.kind == Kind.BACKWARD_WEIGHT for task in schedule(self._axis.size)[0])
        self._stages = {n: Stage(part, splits_backward=has_halves, number=n) for n, part in stages.items()}
        self._instructions = functools.cache(self._make_instructions)

    def _make_instructions(self, microbatches: int, *, evaluates: bool) -> list[Instruction]:
        ranks = self._axis.size
        if evaluates:
            schedule = forward_only(ranks, microbatches, chunks=(self._last_stage + 1) // ranks)
        else:
            schedule = self._schedule(microbatches)
        return make_instructions(schedule, self._axis.rank)

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        *,
        also: Sequence[Sequence[torch.Tensor]] = (),
        forward_context: Context = nullcontext,
    ) -> torch.Tensor:
        """Forward and backward of all microbatches; adds the gradients of their mean loss to the parameters'.

        Without gradients forward alone.

        Args:
            inputs: of each microbatch; on all ranks, which at least learn shapes from them.
            targets: of each microbatch; only the last stage looks at them.
            also: of each microbatch, what every stage's module takes after its input: no gradients go there.
            forward_context: made anew around every forward, such as autocast.

        Returns:
            The mean loss, a scalar, the same on all ranks.
        """
        count, last = len(inputs), self._last_stage

        def empty(message: Message) -> torch.Tensor:
            sender = message.stage - (message.what == ACTIVATIONS)  # a gradient is like what it is of
            return torch.empty_like(
                self._boundary(sender, inputs[message.microbatch]), device=inputs[0].device
            )

        def finish(stage: int, microbatch: int, y: torch.Tensor) -> torch.Tensor:
            return self._loss(y, targets[microbatch]) / count if stage == last else y

        evaluates = not torch.is_grad_enabled()
        mail: dict[Message, Any] = {}
        for microbatch, x in enumerate(inputs):
            if 0 in self._stages:
                mail[activation(0, microbatch)] = x
            if last in self._stages and not evaluates:
                mail[gradient(last, microbatch)] = None
        run_pipeline(
            self._instructions(count, evaluates=evaluates),
            self._stages,
            mail,
            self._axis,
            empty=empty,
            finish=finish,
            also=also,
            forward_context=forward_context,
            no_sync=self._no_sync,
        )
        total = torch.zeros((), dtype=torch.float64, device=inputs[0].device)  # whatever the loss has fits
        for loss in mail.values():
            total += loss
        self._axis.all_reduce(total, purpose=LOSS)
        return total


def run_stages(part: GPTStages, parallel: ParallelModel, axis: Axis, layout: Layout) -> ParallelModel:
    """A rank's stages of a GPT, parallel over the other axes, run by the layout's schedule.

    Args:
        part: the stages, which `parallel.module` is, or wraps.
        parallel: these.
        axis: the pipeline's ranks.
        layout: schedule, chunks and microbatches.
    """

    def boundary(stage: int, ids_BT: torch.Tensor) -> torch.Tensor:
        """The residual stream (B, T, C) behind a stage, without data."""
        rows, length = ids_BT.shape
        length //= layout.tp if layout.sequence_parallel else 1
        return torch.empty(rows, length, part.width, dtype=part.dtype, device="meta")

    pipeline = PipelineParallel(
        stage_modules(parallel.module, part),
        count=part.stages,
        schedule=lambda microbatches: make_schedule(
            layout.schedule, ranks=axis.size, microbatches=microbatches, chunks=layout.chunks
        ),
        loss=part.mean_loss,
        boundary=boundary,
        group=axis,
        no_sync=parallel.no_sync,
    )

    def run(batch: RankBatch, forward_context: Context) -> torch.Tensor:
        """(A, b, T) in microbatches (B, T), to the mean loss, ()."""
        size = batch.inputs_ABT.shape[1] // layout.microbatches
        inputs, targets, *keys = (t.flatten(0, 1).split(size) for t in batch if t is not None)
        return pipeline.run(
            inputs, targets, also=list(zip(*keys, strict=True)), forward_context=forward_context
        )

    return replace(parallel, run_pipeline=run, evaluate_pipeline=torch.no_grad()(run))
