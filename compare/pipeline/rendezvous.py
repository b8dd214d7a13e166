"""The messages of a pipeline schedule in one order, so that a receive finds its send without a tag.

NCCL matches the messages of two ranks by order. It processes a rank's messages in sequence, and a send ends
only after its receive has started. So all ranks use one common order: the order in which the tasks that make
the messages end on the simulator's clock. Each message depends only on earlier messages. So the ranks
cannot deadlock: sender and receiver of the first pending message wait only for finished messages.
"""

from collections import deque
from itertools import takewhile

from compare.pipeline.schedules import Schedule, Task
from compare.pipeline.simulator import Action, run, with_communication


def in_one_order(schedule: Schedule) -> list[list[Action]]:
    """Each rank's actions: `with_communication`, but a receive stands where it is to be posted.

    That is one computation ahead of its use, where the messages before it allow that; and always before any
    message that comes behind it in the common order. Raises ScheduleError: the schedule is
    incomplete, or deadlocked.
    """
    ended = {slot.task: slot.end for slot in run(schedule)}

    def place(action: Action) -> tuple[float, Task]:
        made_by = maker(action)
        return ended[made_by], made_by

    return [
        _posted(own, sorted((action for action in own if action.peer >= 0), key=place))
        for own in with_communication(schedule)
    ]


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
            if is_receive(later) and all(map(is_receive, before)):  # else a send is first
                post_until(later)
        posted.append(action)
    return posted


def is_receive(action: Action) -> bool:
    """Whether an action is the end of a message that takes it."""
    return action.what.startswith("receive")


def maker(action: Action) -> Task:
    """The task whose result a message is."""
    kind, stage, microbatch = action.task
    if not is_receive(action):
        return action.task
    return Task(kind, stage - 1 if action.what == "receive_activation" else stage + 1, microbatch)
