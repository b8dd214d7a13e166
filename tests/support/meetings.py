"""A network that is as strict as any may be: the judge of the order in which ranks post their messages."""

from collections import deque

from compare.pipeline.rendezvous import is_receive, maker
from compare.pipeline.schedules import Task
from compare.pipeline.simulator import Action, ScheduleError, prerequisites


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
                    done[end].add(maker(posted[end].popleft()))
                progressed = True
        if not progressed:
            heads = [(rank, own[0]) for rank, own in enumerate(posted) if own]
            stuck = "; ".join(f"rank {rank} in {head.what} of {head.task}" for rank, head in heads)
            raise ScheduleError(f"deadlock of messages: {stuck}")


def _meet(action: Action, other: Action) -> bool:
    """Whether two ranks' actions are the two ends of one message."""
    return is_receive(action) != is_receive(other) and maker(action) == maker(other)
