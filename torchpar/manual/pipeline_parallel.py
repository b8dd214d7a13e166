"""Pipeline parallelism by hand: each rank has some of the layers, and microbatches pass through the ranks.

A schedule is plain data (`compare.pipeline.schedules`): for each rank its tasks, in order. 1F1B with 2 ranks
and 2 microbatches:

    rank 0    F0  F1  B0  B1      F0 sends an activation to rank 1.
    rank 1    F0  B0  F1  B1      B0 sends its gradient to rank 0, which waits for it before its own B0.

To the tasks `compare.pipeline.rendezvous` adds sends and receives. A send follows the task that makes its
tensor. A receive is posted one task ahead of its use, where the messages before it allow that. All ranks list
their messages in one common order. A message depends only on earlier ones, so no rank waits forever.

`run_pipeline` runs the list, one action at a time, on the rank's stages (`stage`, `zero_bubble`). It waits
for a receive just before the computation that uses it: data moves while the rank computes. It waits for a
send once a later message proves that it has arrived, so a send delays nothing. Evaluation is a schedule
without backwards. After the last backward the first and the last rank exchange the gradients of the tied
weight (`tied_weights`).

A passes, b rows of a rank, M microbatches of a step, B rows of a microbatch, T positions, C embedding.
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
from compare.spec.axes import PP
from compare.spec.experiment import Layout
from torchpar.batch import RankBatch
from torchpar.comm.collectives import Axis, Work
from torchpar.comm.mesh import Mesh
from torchpar.engine import Engine
from torchpar.gpt_stages import GPTStages
from torchpar.manual.stage import Stage
from torchpar.manual.zero_bubble import ZeroBubbleStage
from torchpar.tied_weights import pipeline_sharding

Context = Callable[[], AbstractContextManager]


class Message(NamedTuple):
    """A tensor between two stages, named after the stage that takes it."""

    purpose: str
    """ACTIVATIONS, or ACTIVATION_GRADIENTS: the gradient of the stage's output."""
    stage: int
    microbatch: int


class Plan(NamedTuple):
    """One rank's actions of a schedule."""

    actions: Sequence[Action]
    arrivals: Mapping[Message, Sequence[Message]]
    """By message to this rank, the messages of this rank that have certainly arrived by then: the sender
    received them before. Their tensors can be freed."""
    last_backwards: Collection[Task]
    """The backwards that complete a stage's gradients. Empty if a backward is two tasks."""


def make_plan(schedule: Schedule, rank: int) -> Plan:
    """Plan a rank's actions before anything runs. Raises ScheduleError: incomplete, or a deadlock."""
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
    upwards: Axis,
    loss_scale: float,
    no_sync: Context,
) -> torch.Tensor:
    """Run a rank's actions of one step. Returns the mean loss, (), and adds its gradients times `loss_scale`.

    Args:
        stages: this rank's, by their number along the model.
        part: the module of the stages, which computes the loss and knows the shape of the messages.
        axis: the ranks of the pipeline, which send activations.
        upwards: the same ranks, which send gradients.
        inputs: (B, T) of each microbatch, the same on all ranks; so are targets, and keys for dropout.
        no_sync: made for each backward except the last one of each stage.
    """
    last_stage = part.stages - 1
    mail: dict[Message, Any] = {Message(ACTIVATIONS, 0, m): x for m, x in enumerate(inputs) if 0 in stages}
    receiving, sending = dict[Message, Work](), dict[Message, Work]()
    axis_of = {ACTIVATIONS: axis, ACTIVATION_GRADIENTS: upwards}

    def finish(stage: int, m: int, y: torch.Tensor) -> torch.Tensor:
        return part.mean_loss(y, targets[m]) * loss_scale / len(inputs) if stage == last_stage else y

    def take(message: Message) -> torch.Tensor:
        if message in receiving:
            receiving.pop(message).wait()
            for earlier in plan.arrivals[message]:
                sending.pop(earlier).wait()  # returns at once
                del mail[earlier]
        return mail.pop(message)

    for action in plan.actions:
        kind, stage, m = action.task
        if is_receive(action):
            # Post the receive: the message arrives while this rank computes earlier tasks.
            message = message_of(action)
            mail[message] = part.empty_stream(inputs[m])  # a gradient has the shape of its activation
            receiving[message] = axis_of[message.purpose].start_receive(mail[message], source=action.peer)
        elif action.what != "compute":
            # Send an activation to the next stage, or a gradient to the stage before, and compute on.
            message = message_of(action)
            way = axis_of[message.purpose]
            sending[message] = way.start_send(mail[message], to=action.peer, purpose=message.purpose)
        elif kind == Kind.FORWARD:
            x = take(Message(ACTIVATIONS, stage, m))
            y = stages[stage].forward(m, x, *keys[m : m + 1], finish=partial(finish, stage, m))
            mail[Message(ACTIVATIONS, stage + 1, m)] = y.contiguous()
        elif kind == Kind.BACKWARD_WEIGHT:
            weight_stage = stages[stage]
            assert isinstance(weight_stage, ZeroBubbleStage)
            with no_sync():
                weight_stage.backward_weight(m)
        else:  # a whole backward, or in zero bubble its input half
            dy = None if stage == last_stage else take(Message(ACTIVATION_GRADIENTS, stage, m))
            with nullcontext() if action.task in plan.last_backwards else no_sync():
                dx = stages[stage].backward(m, dy)
            if dx is not None:  # token ids have no gradient
                mail[Message(ACTIVATION_GRADIENTS, stage - 1, m)] = dx.contiguous()
    for message, work in sending.items():
        work.wait()
        del mail[message]
    # The mail that is left is the loss of each microbatch, on the last stage. Sum it over all stages.
    total = torch.zeros((), dtype=torch.float64, device=inputs[0].device)
    for share in mail.values():
        total += share
    axis.all_reduce(total, purpose=LOSS)
    return total / loss_scale


def run_stages(part: GPTStages, engine: Engine, mesh: Mesh, layout: Layout) -> Engine:
    """Run a rank's stages of a GPT by the layout's schedule. `engine.module` is `part`, or wraps it.

    NCCL runs the calls of a group one at a time. Interleaved stages send activations and gradients at once.
    """
    axis = mesh[PP]
    upwards = mesh.again(PP) if layout.schedule == "interleaved" else axis
    kind = ZeroBubbleStage if layout.schedule == "zero_bubble" else Stage
    stages = {number: kind(engine.module, number) for number in part.blocks_of}

    @cache
    def plan(microbatches: int, *, evaluates: bool) -> Plan:
        options = {"ranks": axis.size, "microbatches": microbatches, "chunks": layout.chunks}
        schedule = forward_only(**options) if evaluates else make_schedule(layout.schedule, **options)
        return make_plan(schedule, axis.rank)

    def run(batch: RankBatch, forward_context: Context, loss_scale: float = 1.0) -> torch.Tensor:
        """(A, b, T) in microbatches (B, T), to the mean loss, ()."""
        size = batch.inputs_ABT.shape[1] // layout.microbatches
        batches = [t.flatten(0, 1).split(size) for t in batch if t is not None]
        actions = plan(len(batches[0]), evaluates=not torch.is_grad_enabled())
        part.forward_context = forward_context
        options = {"upwards": upwards, "loss_scale": loss_scale, "no_sync": engine.no_sync}
        return run_pipeline(actions, stages, part, axis, *batches, **options)

    return replace(engine.with_sharding(pipeline_sharding(axis, engine.parameters)), run_pipeline=run)
