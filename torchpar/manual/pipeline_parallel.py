"""Pipeline parallelism by hand: ranks hold a share of the layers each, and microbatches pass through them.

A schedule is plain data (`compare.pipeline.schedules`): for each rank its tasks in order, to which
`compare.pipeline.rendezvous` adds sends and receives. Rank 1 of 2 does a microbatch of GPipe so:

    receive_activation   compute: forward   compute: backward   send_gradient

`run_pipeline` carries out any such list, a task at a time (`stage`). A receive is posted early and waited for
just before its computation: data moves while the rank computes. A send is waited for only where a later
message proves that it has arrived: it holds up nothing. Evaluation is a schedule without backwards.

A passes, b rows of a rank, M microbatches of a step, B rows of one, T positions, C embedding.
Sources: GPipe (arXiv 1811.06965), 1F1B (2006.09503), interleaved (2104.04473), zero bubble (2401.10241).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from compare.contract.communication import ACTIVATION_GRADIENTS, ACTIVATIONS, LOSS
from compare.pipeline.rendezvous import in_one_order, is_receive
from compare.pipeline.schedules import Kind, Schedule, Task, forward_only, make_schedule
from compare.pipeline.simulator import Action, with_communication
from compare.spec.experiment import Layout
from torchpar.batch import RankBatch
from torchpar.comm.collectives import Axis, Work
from torchpar.engine import Engine
from torchpar.gpt_stages import GPTStages, pipeline
from torchpar.manual.stage import Stage

Context = Callable[[], AbstractContextManager]


class Message(NamedTuple):
    """A tensor between two stages, named after the stage that takes it."""

    purpose: str
    """ACTIVATIONS, or ACTIVATION_GRADIENTS: the gradient of the stage's output."""
    stage: int
    microbatch: int


class Plan(NamedTuple):
    """One rank's part of a schedule."""

    actions: Sequence[Action]
    arrivals: Mapping[Message, Sequence[Message]]
    """By message to this rank: messages of this rank that its sender had received before it sent that."""
    last_backwards: Collection[Task]
    """The stages' gradients are complete after these; there are none where a backward has two halves."""


def make_plan(schedule: Schedule, rank: int) -> Plan:
    """Decided before anything runs. Raises ScheduleError: the schedule is incomplete, or deadlocked."""
    last_backwards = {task.stage: task for task in schedule[rank] if task.kind == Kind.BACKWARD}
    arrivals = {}
    for actions in with_communication(schedule):
        arrived: list[Message] = []
        for action in (action for action in actions if action.peer == rank):
            if is_receive(action):
                arrived.append(message_of(action))
            else:
                arrivals[message_of(action)], arrived = arrived, []
    return Plan(in_one_order(schedule)[rank], arrivals, last_backwards.values())


def message_of(action: Action) -> Message:
    """The message that an action sends or receives."""
    kind, stage, microbatch = action.task
    sends = not is_receive(action)
    if kind == Kind.FORWARD:
        return Message(ACTIVATIONS, stage + sends, microbatch)
    return Message(ACTIVATION_GRADIENTS, stage - sends, microbatch)


def run_pipeline(
    plan: Plan,
    stages: Mapping[int, Stage],
    part: GPTStages,
    axis: Axis,
    inputs: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    keys: Sequence[torch.Tensor] = (),
    *,
    loss_scale: float = 1.0,
    forward_context: Context = nullcontext,
    no_sync: Context = nullcontext,
) -> torch.Tensor:
    """Carry out a rank's actions of one step, in order. Adds the gradients of the mean loss times
    `loss_scale`, and returns the mean loss.

    Stages are this rank's, by their number along the model; the part of it that they are of knows the loss,
    and the shape of what goes between them. Inputs (B, T), targets and keys, if there is dropout, are of each
    microbatch, on all ranks. `forward_context` is made anew around every forward, such as autocast, and
    `no_sync` around every backward but each stage's last.
    """
    last_stage = part.stages - 1
    mail: dict[Message, Any] = {Message(ACTIVATIONS, 0, m): x for m, x in enumerate(inputs) if 0 in stages}
    receiving, sending = dict[Message, Work](), dict[Message, Work]()

    def finish(stage: int, m: int, y: torch.Tensor) -> torch.Tensor:
        return part.mean_loss(y, targets[m]) * loss_scale / len(inputs) if stage == last_stage else y

    def take(message: Message) -> torch.Tensor:
        if message in receiving:
            receiving.pop(message).wait()
            for earlier in plan.arrivals[message]:
                sending.pop(earlier).wait()  # returns at once
                del mail[earlier]  # and nothing keeps it any longer
        return mail.pop(message)

    for action in plan.actions:
        kind, stage, m = action.task
        if is_receive(action):
            message = message_of(action)
            mail[message] = part.empty_stream(inputs[m])  # a gradient is like what it is of
            receiving[message] = axis.start_receive(mail[message], source=action.peer)
        elif action.what != "compute":
            message = message_of(action)
            sending[message] = axis.start_send(mail[message], to=action.peer, purpose=message.purpose)
        elif kind == Kind.FORWARD:
            x = take(Message(ACTIVATIONS, stage, m))
            with forward_context():
                y = stages[stage].forward(m, x, *keys[m : m + 1], finish=partial(finish, stage, m))
            mail[Message(ACTIVATIONS, stage + 1, m)] = y.contiguous()
        elif kind == Kind.BACKWARD_WEIGHT:
            with no_sync():
                stages[stage].backward_weight(m)
        else:  # all of a backward, or as far as the stage's input
            of_y = None if stage == last_stage else take(Message(ACTIVATION_GRADIENTS, stage, m))
            with nullcontext() if action.task in plan.last_backwards else no_sync():
                of_x = stages[stage].backward(m, of_y)
            if of_x is not None:  # tokens have none
                mail[Message(ACTIVATION_GRADIENTS, stage - 1, m)] = of_x.contiguous()
    for message, work in sending.items():
        work.wait()
        del mail[message]
    total = torch.zeros((), dtype=torch.float64, device=inputs[0].device)  # whatever the loss has fits
    for share in mail.values():  # what the last stage leaves
        total += share
    axis.all_reduce(total, purpose=LOSS)
    return total / loss_scale


def run_stages(part: GPTStages, engine: Engine, axis: Axis, layout: Layout) -> Engine:
    """Let the layout's schedule run a rank's stages of a GPT, which `engine.module` is, or wraps."""
    halves = layout.schedule == "zero_bubble"
    stages = {number: Stage(engine.module, splits_backward=halves, stage=number) for number in part.blocks_of}

    @cache
    def plan(microbatches: int, *, evaluates: bool) -> Plan:
        options = {"ranks": axis.size, "microbatches": microbatches, "chunks": layout.chunks}
        schedule = forward_only(**options) if evaluates else make_schedule(layout.schedule, **options)
        return make_plan(schedule, axis.rank)

    def run(batch: RankBatch, forward_context: Context, loss_scale: float = 1.0) -> torch.Tensor:
        """(A, b, T) in microbatches (B, T), to the mean loss, ()."""
        size = batch.inputs_ABT.shape[1] // layout.microbatches
        batches = [t.flatten(0, 1).split(size) for t in batch if t is not None]
        own = plan(len(batches[0]), evaluates=not torch.is_grad_enabled())
        options = {"loss_scale": loss_scale, "forward_context": forward_context, "no_sync": engine.no_sync}
        return run_pipeline(own, stages, part, axis, *batches, **options)

    return replace(engine.with_sharding(pipeline(axis, engine.parameters)), run_pipeline=run)
