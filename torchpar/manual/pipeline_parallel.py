"""Pipeline parallelism by hand: ranks hold a share of the layers each, and microbatches pass through them.

A schedule is plain data (`compare.contract.schedules`): for each rank the tasks in the order in which it does
them. `PipelineParallel` carries out any such list for any modules. Sends are asynchronous; each receive is
posted one computation ahead, so that data moves while the rank computes.

Sources: GPipe (arXiv 1811.06965), 1F1B (2006.09503), interleaved (2104.04473), zero bubble (2401.10241).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from compare.contract.communication import ACTIVATION_GRADIENTS, ACTIVATIONS, LOSS
from compare.contract.schedule_simulator import check_complete, with_communication
from compare.contract.schedules import Kind, Schedule, Task
from torchpar.comm.collectives import Axis, ProcessGroup
from torchpar.manual.pipeline.p2p import Mailbox, Message
from torchpar.manual.pipeline.stage import Stage


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
        stages: this rank's modules by their place along the model; rank r of p has the stages r, r + p, ...
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
        no_sync: Callable[[], AbstractContextManager] = nullcontext,
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
        self._stages = {n: Stage(module, splits_backward=splits) for n, module in stages.items()}
        self._microbatches = 1 + max(task.microbatch for task in tasks)
        self._actions = with_communication(schedule)
        # Halves of a backward leave gradients at different times: then nothing is reduced before the end.
        final = {} if splits else {(task.kind, task.stage): task for task in tasks}
        self._final = set(final.values())
        self._loss, self._boundary, self._no_sync = loss, boundary, no_sync
        self.peak_in_flight = 0

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        *,
        forward_context: Callable[[], AbstractContextManager] = nullcontext,
    ) -> torch.Tensor:
        """Forward and backward of all microbatches; adds the gradients of their mean loss to the parameters'.

        Args:
            inputs: of each microbatch; on all ranks, which at least learn shapes from them.
            targets: of each microbatch; only the last stage looks at them.
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

        def buffer(message: Message) -> torch.Tensor:
            sender = message.stage - (message.what == ACTIVATIONS)  # a gradient is like what it is of
            like = self._boundary(sender, inputs[message.microbatch])
            return torch.empty_like(like, device=inputs[0].device, memory_format=torch.contiguous_format)

        mailbox = Mailbox(self._axis, self._actions, buffer=buffer)
        losses: list[torch.Tensor] = []
        for place, action in enumerate(self._actions[self._axis.rank]):
            if action.what != "compute":
                mailbox.carry_out(action)
                continue
            mailbox.post_receives(place + 1)
            if action.task.kind == Kind.FORWARD:
                with forward_context():
                    losses += self._forward(action.task, mailbox, inputs, targets)
            else:
                with nullcontext() if action.task in self._final else self._no_sync():
                    self._backward(action.task, mailbox)
            held = sum(stage.in_flight for stage in self._stages.values())
            self.peak_in_flight = max(self.peak_in_flight, held)
        mailbox.close()
        return self._share_loss(losses, inputs[0].device)

    def _forward(
        self,
        task: Task,
        mailbox: Mailbox,
        inputs: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """One microbatch through one stage. Returns its share of the loss, if the stage is the last."""
        _, number, microbatch = task
        stage = self._stages[number]
        x = mailbox.take(Message(ACTIVATIONS, number, microbatch)) if number else inputs[microbatch]
        if number < self._last_stage:
            y = stage.forward(microbatch, x)
            _require_like(number, y, self._boundary(number, inputs[microbatch]))
            mailbox.put(Message(ACTIVATIONS, number + 1, microbatch), y)
            return []
        share = stage.forward(
            microbatch, x, finish=lambda y: self._loss(y, targets[microbatch]) / self._microbatches
        )
        return [share]

    def _backward(self, task: Task, mailbox: Mailbox) -> None:
        """Backward of one microbatch through one stage, or one of its halves."""
        kind, number, microbatch = task
        stage = self._stages[number]
        if kind == Kind.BACKWARD_WEIGHT:
            stage.backward_weight(microbatch)
            return
        gradient = None
        if number < self._last_stage:
            gradient = mailbox.take(Message(ACTIVATION_GRADIENTS, number, microbatch))
        of_input = stage.backward(microbatch, gradient)
        if number:
            assert of_input is not None
            mailbox.put(Message(ACTIVATION_GRADIENTS, number - 1, microbatch), of_input)

    def _share_loss(self, shares: list[torch.Tensor], device: torch.device) -> torch.Tensor:
        """The sum of what only the last stage has, on all ranks."""
        total = torch.zeros((), dtype=torch.float64, device=device)  # whatever the loss has, it fits
        for share in shares:
            total += share
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
