"""The messages of a pipeline schedule in one order, so that a receive finds its send without a tag.

NCCL matches the messages of two ranks by their order alone, carries out a rank's messages one after the
other, and lets a send end only where its receive has begun. So all ranks go through their messages in one
common order: that in which the tasks that make them end, when the schedule runs on a clock. What a message
depends on was made before it. Hence no deadlock: of all messages still to come, the first one's sender and
its receiver wait for nothing but earlier ones.
"""

from collections import deque
from itertools import takewhile

from compare.pipeline.schedules import Schedule, Task
from compare.pipeline.simulator import (
    Action,
    ScheduleError,
    prerequisites,
    run,
    with_communication,
)


def in_one_order(schedule: Schedule) -> list[list[Action]]:
    """Each rank's actions: `with_communication`, but a receive stands where it is to be posted.

    That is one computation ahead of its use, where the messages before it allow that; and always before any
    message that comes behind it in the common order.

    Raises:
        ScheduleError: the schedule is incomplete, or deadlocked.
    """
    ended = {slot.task: slot.end for slot in run(schedule)}

    def place(action: Action) -> tuple[float, Task]:
        maker = _maker(action)
        return ended[maker], maker

    return [_posted(own, sorted(_messages(own), key=place)) for own in with_communication(schedule)]


def check_rendezvous(actions: list[list[Action]]) -> None:
    """Carry actions out as strictly as any network may: messages one by one, each when both ends are there.

    Args:
        actions: each rank's, in order; a computation waits for what it needs, a message does not hold it up.

    Raises:
        ScheduleError: ranks wait for each other, if only because two have their messages in different orders.
    """
    stages = 1 + max(action.task.stage for own in actions for action in own)
    position = [0] * len(actions)
    posted: list[deque[Action]] = [deque() for _ in actions]
    done: list[set[Task]] = [set() for _ in actions]  # by rank, the tasks whose results it has
    while any(posted) or any(place < len(own) for place, own in zip(position, actions, strict=True)):
        progressed = False
        for rank, own in enumerate(actions):
            while position[rank] < len(own):
                action = own[position[rank]]
                if action.what != "compute":
                    posted[rank].append(action)
                elif done[rank].issuperset(prerequisites(action.task, stages)):
                    done[rank].add(action.task)
                else:
                    break
                position[rank] += 1
                progressed = True
            if posted[rank] and (other := posted[posted[rank][0].peer]) and _meet(posted[rank][0], other[0]):
                for end in (rank, posted[rank][0].peer):
                    done[end].add(_maker(posted[end].popleft()))
                progressed = True
        if not progressed:
            heads = [(rank, own[0]) for rank, own in enumerate(posted) if own]
            stuck = "; ".join(f"rank {rank} in {head.what} of {head.task}" for rank, head in heads)
            raise ScheduleError(f"deadlock of messages: {stuck}")


def _posted(own: list[Action], messages: list[Action]) -> list[Action]:
    """One rank's actions with its messages in this order."""
    waiting, posted = deque(messages), []

    def post_until(message: Action) -> None:
        while message in waiting:
            posted.append(waiting.popleft())

    for index, action in enumerate(own):
        if action.what != "compute":
            post_until(action)
            continue
        for later in takewhile(lambda later: later.what != "compute", own[index + 1 :]):
            before = takewhile(lambda message, later=later: message != later, waiting)
            if _is_receive(later) and all(map(_is_receive, before)):  # else a send is first
                post_until(later)
        posted.append(action)
    return posted


def _messages(own: list[Action]) -> list[Action]:
    return [action for action in own if action.what != "compute"]


def _is_receive(action: Action) -> bool:
    return action.what.startswith("receive")


def _maker(action: Action) -> Task:
    """The task whose result a message is."""
    kind, stage, microbatch = action.task
    if not _is_receive(action):
        return action.task
    return Task(kind, stage - 1 if action.what == "receive_activation" else stage + 1, microbatch)


def _meet(action: Action, other: Action) -> bool:
    """Whether two ranks' actions are the two ends of one message."""
    return _is_receive(action) != _is_receive(other) and _maker(action) == _maker(other)
