"""Pipeline parallelism by hand: ranks hold a share of the layers each, and microbatches pass through them.

A schedule is plain data (`compare.pipeline.schedules`): for each rank its tasks in order. So is the list of
instructions that a rank makes of it (`pipeline.instructions`), sends and receives included. `run_pipeline`
carries out any such list for any modules: data moves while the rank computes.

Sources: GPipe (arXiv 1811.06965), 1F1B (2006.09503), interleaved (2104.04473), zero bubble (2401.10241).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import nn

from compare.contract.communication import ACTIVATIONS, LOSS
from compare.pipeline.schedules import Kind, Schedule
from compare.pipeline.simulator import check_complete
from torchpar.comm.collectives import Axis, ProcessGroup
from torchpar.comm.handles import Work
from torchpar.manual.pipeline.instructions import (
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
from torchpar.manual.pipeline.mailbox import Mailbox
from torchpar.manual.pipeline.stage import Stage

Context = Callable[[], AbstractContextManager]


def run_pipeline(
    instructions: Iterable[Instruction],
    stages: Mapping[int, Stage],
    mail: Mailbox,
    axis: Axis,
    *,
    also: Sequence[Sequence[torch.Tensor]] = (),
    finish: Callable[[int, int, torch.Tensor], torch.Tensor] = lambda stage, microbatch, y: y,
    forward_context: Context = nullcontext,
    no_sync: Context = nullcontext,
) -> int:
    """Carry out a rank's instructions of one step, in order.

    Args:
        instructions: from `make_instructions`.
        stages: this rank's, by number along the model.
        mail: holds what the first stage takes and then what the last one leaves.
        axis: the ranks.
        also: further inputs of every module, (B, ...), by microbatch.
        finish: from a stage's number, a microbatch and its module's output to the stage's output.
        forward_context: around every forward.
        no_sync: around every backward but each stage's last.

    Returns:
        The most microbatches whose activations were held at once.
    """
    receiving: dict[Message, Work] = {}
    sending: dict[Message, Work] = {}
    peak_in_flight = 0
    for instruction in instructions:
        match instruction:
            case StartReceive(message, source):
                receiving[message] = axis.start_receive(mail.buffer(message), source=source)
            case FinishReceive(message, arrived):
                receiving.pop(message).wait()
                for earlier in arrived:
                    sending.pop(earlier).wait()  # returns at once
                    mail.take(earlier)  # and nothing keeps it any longer
            case Forward(stage, m):
                x, y = activation(stage, m), activation(stage + 1, m)
                more = also[m] if also else ()
                with forward_context():
                    found = stages[stage].forward(m, mail.take(x), *more, finish=partial(finish, stage, m))
                mail.put(y, found)
                peak_in_flight = max(peak_in_flight, sum(held.in_flight for held in stages.values()))
            case Backward(stage, m, is_last):
                of_y, of_x = gradient(stage, m), gradient(stage - 1, m)
                with nullcontext() if is_last else no_sync():
                    mail.put(of_x, stages[stage].backward(m, mail.take(of_y)))
            case BackwardWeight(stage, m):
                with no_sync():
                    stages[stage].backward_weight(m)
            case Send(message, to):
                sending[message] = axis.start_send(mail.peek(message), to=to, purpose=message.what)
    for message, work in sending.items():
        work.wait()
        mail.take(message)
    return peak_in_flight


@torch.no_grad()
def evaluate_stages(
    stages: Mapping[int, nn.Module],
    inputs: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    *,
    count: int,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    boundary: Callable[[int, torch.Tensor], torch.Tensor],
    axis: Axis,
    forward_context: Context = nullcontext,
) -> torch.Tensor:
    """The mean loss of some microbatches. Nothing is kept for a backward.

    A rank takes a microbatch through all of its stages before the next one: with one stage a rank they fill
    the pipeline, with more each rank waits for its own microbatch to come around.

    Args:
        stages: this rank's modules by their number along the model.
        inputs, targets, loss, boundary, forward_context: as for `PipelineParallel`.
        count: of all stages.
        axis: the ranks.

    Returns:
        A scalar, the same on all ranks.
    """
    total = torch.zeros((), dtype=torch.float64, device=inputs[0].device)
    sending = []
    before, after = (axis.rank - 1) % axis.size, (axis.rank + 1) % axis.size
    for x_of_first, targets_of in zip(inputs, targets, strict=True):
        for stage in sorted(stages):
            x = x_of_first
            if stage:
                x = torch.empty_like(boundary(stage - 1, x_of_first), device=total.device)
                axis.start_receive(x, source=before).wait()
            with forward_context():
                y = stages[stage](x)
                if stage == count - 1:
                    total += loss(y, targets_of) / len(inputs)
            if stage < count - 1:
                y = y.contiguous()
                sending.append((y, axis.start_send(y, to=after, purpose=ACTIVATIONS)))  # which keeps it
        while len(sending) > axis.size:
            sending.pop(0)[1].wait()
    for _, work in sending:
        work.wait()
    if axis.size > 1:
        axis.all_reduce(total, purpose=LOSS)
    return total


class PipelineParallel:
    """The stages of one rank, and the schedule that takes microbatches through them.

        >>> axis = Axis.of(None)
        >>> stage = nn.Sequential(nn.Linear(8, 8), nn.Tanh())       # this rank's layers
        >>> pipeline = PipelineParallel(
        ...     {axis.rank: stage},
        ...     schedule=make_schedule("1f1b", ranks=axis.size, microbatches=4),
        ...     loss=nn.functional.mse_loss,
        ...     boundary=lambda stage, x: torch.empty(x.shape, device="meta"),
        ... )
        >>> optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
        >>> for x, y in torch.randn(3, 2, 16, 8):                   # inputs and targets of a step
        ...     loss = pipeline.run(x.chunk(4), y.chunk(4))
        ...     optimizer.step()
        ...     optimizer.zero_grad()

    Args:
        stages: this rank's modules by their number along the model; rank r of p has the stages r, r + p, ...
            Each takes one tensor and returns one: a microbatch's inputs on the first stage.
        schedule: of all ranks, such as `make_schedule("1f1b", ranks=4, microbatches=8)`.
        loss: from the last stage's output and a microbatch's targets to their mean loss, a scalar.
        boundary: from a stage's number and a microbatch's inputs to a tensor that is like the stage's
            output (one on the device "meta" will do): how others know what to receive.
        group: the ranks: an Axis, a torch ProcessGroup, or None for all.
        no_sync: a context for every backward but each stage's last, or for all if the schedule has it in
            two halves: see DataParallel. Gradients are complete after `finish_gradient_synchronization`.

    Attributes:
        peak_in_flight: the most microbatches whose activations were held at once, over all steps.

    Raises:
        ValueError: `stages` are not those that the schedule has on this rank.
        ScheduleError: the schedule is not complete.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        *,
        schedule: Schedule,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        boundary: Callable[[int, torch.Tensor], torch.Tensor],
        group: Axis | ProcessGroup | None = None,
        no_sync: Context = nullcontext,
    ):
        self._axis = Axis.of(group)
        self._last_stage = check_complete(schedule) - 1
        tasks = schedule[self._axis.rank] if len(schedule) == self._axis.size else []
        wanted = sorted({task.stage for task in tasks})
        if sorted(stages) != wanted:
            raise ValueError(
                f"rank {self._axis.rank} of {self._axis.size} was given the stages {sorted(stages)}; the "
                f"schedule is for {len(schedule)} ranks, and has {wanted} there"
            )
        splits = any(task.kind == Kind.BACKWARD_WEIGHT for task in tasks)
        self._stages = {n: Stage(module, splits_backward=splits, number=n) for n, module in stages.items()}
        self._microbatches = 1 + max(task.microbatch for task in tasks)
        self._instructions = make_instructions(schedule, self._axis.rank)
        self._loss, self._boundary, self._no_sync = loss, boundary, no_sync
        self.peak_in_flight = 0

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        *,
        also: Sequence[Sequence[torch.Tensor]] = (),
        forward_context: Context = nullcontext,
    ) -> torch.Tensor:
        """Forward and backward of all microbatches; adds the gradients of their mean loss to the parameters'.

        Args:
            inputs: of each microbatch; on all ranks, which at least learn shapes from them.
            targets: of each microbatch; only the last stage looks at them.
            also: of each microbatch, what every stage's module takes after its input: no gradients go there.
            forward_context: made anew around every forward, such as autocast.

        Returns:
            The mean loss, a scalar, the same on all ranks.

        Raises:
            ValueError: another number of microbatches than the schedule has; or a stage returned something
                else than `boundary` says.
        """
        if not len(inputs) == len(targets) == self._microbatches:
            raise ValueError(
                f"{len(inputs)} inputs and {len(targets)} targets for a schedule of {self._microbatches} "
                f"microbatches"
            )

        def empty(message: Message) -> torch.Tensor:
            sender = message.stage - (message.what == ACTIVATIONS)  # a gradient is like what it is of
            like = self._boundary(sender, inputs[message.microbatch])
            return torch.empty_like(like, device=inputs[0].device, memory_format=torch.contiguous_format)

        def finish(stage: int, microbatch: int, y: torch.Tensor) -> torch.Tensor:
            if stage == self._last_stage:
                return self._loss(y, targets[microbatch]) / self._microbatches
            _require_like(stage, y, self._boundary(stage, inputs[microbatch]))
            return y

        mail = Mailbox(self._given(inputs), empty=empty)
        peak = run_pipeline(
            self._instructions,
            self._stages,
            mail,
            self._axis,
            also=also,
            finish=finish,
            forward_context=forward_context,
            no_sync=self._no_sync,
        )
        self.peak_in_flight = max(self.peak_in_flight, peak)
        return self._share_loss(mail, inputs[0].device)

    def _given(self, inputs: Sequence[torch.Tensor]) -> dict[Message, torch.Tensor | None]:
        """Inputs of the first stage, and for the last one None as the gradient of its loss."""
        given: dict[Message, torch.Tensor | None] = {}
        if 0 in self._stages:
            given.update({activation(0, microbatch): x for microbatch, x in enumerate(inputs)})
        if self._last_stage in self._stages:
            given.update({gradient(self._last_stage, microbatch): None for microbatch in range(len(inputs))})
        return given

    def _share_loss(self, mail: Mailbox, device: torch.device) -> torch.Tensor:
        """The sum of the last stage's losses, on all ranks."""
        total = torch.zeros((), dtype=torch.float64, device=device)  # whatever the loss has, it fits
        if self._last_stage in self._stages:
            for microbatch in range(self._microbatches):
                total += mail.take(activation(self._last_stage + 1, microbatch))
        mail.require_empty()
        if self._axis.size > 1:
            self._axis.all_reduce(total, purpose=LOSS)
        return total


def _require_like(stage: int, y: torch.Tensor, like: torch.Tensor) -> None:
    """Another shape or dtype than the next rank receives into would arrive as garbage, or never."""
    if (y.shape, y.dtype) != (like.shape, like.dtype):
        raise ValueError(
            f"stage {stage} returned {tuple(y.shape)} {y.dtype}, and boundary says "
            f"{tuple(like.shape)} {like.dtype}"
        )
