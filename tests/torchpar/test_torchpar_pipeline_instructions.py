"""Instructions of pipeline ranks, carried out without a network on labels in place of tensors."""

from collections import defaultdict, deque

import pytest

from compare.pipeline.rendezvous import in_one_order
from compare.pipeline.schedules import Schedule, make_schedule
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

CASES = [
    (name, ranks, microbatches, chunks)
    for name, chunks in (("gpipe", 1), ("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2))
    for ranks in (1, 2, 3, 4)
    for microbatches in (ranks, 3 * ranks)
]


def of_all_ranks(schedule: Schedule) -> list[list[Instruction]]:
    return [make_instructions(schedule, rank) for rank in range(len(schedule))]


def carry_out(ranks: list[list[Instruction]], *, stages: int) -> None:
    """Every rank until its end. AssertionError: a wait for a message that is not sent, or a lost message."""
    queues = [deque(own) for own in ranks]
    sent: dict[tuple[int, int], deque[Message]] = defaultdict(deque)  # by sender and receiver: no tags
    received: set[Message] = set()
    here: list[set[Message]] = [set() for _ in ranks]
    posted: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
    senders: dict[Message, int] = {}
    unproven: list[set[Message]] = [set() for _ in ranks]
    while any(queues):
        progressed = False
        for rank, queue in enumerate(queues):
            while queue:
                instruction = queue[0]
                match instruction:
                    case StartReceive(message, source):
                        posted[source, rank].append(message)
                        senders[message] = source
                    case FinishReceive(message, arrived):
                        channel = (senders[message], rank)
                        while message not in received and sent[channel]:
                            first = posted[channel].popleft()
                            assert sent[channel].popleft() == first
                            received.add(first)
                        if message not in received:
                            break
                        assert unproven[rank].issuperset(arrived)
                        assert received.issuperset(arrived)
                        unproven[rank].difference_update(arrived)
                        here[rank].add(message)
                    case Forward(stage, m):
                        assert stage == 0 or activation(stage, m) in here[rank]
                        here[rank].discard(activation(stage, m))
                        here[rank].add(activation(stage + 1, m))
                    case Backward(stage, m):
                        assert stage == stages - 1 or gradient(stage, m) in here[rank]
                        here[rank].discard(gradient(stage, m))
                        here[rank].add(gradient(stage - 1, m))
                    case Send(message, to):
                        here[rank].remove(message)
                        sent[rank, to].append(message)
                        unproven[rank].add(message)
                queue.popleft()
                progressed = True
        assert progressed, f"deadlock: {[queue[0] for queue in queues if queue]}"
    assert not any(sent.values())
    assert not any(posted.values())


def test_every_message_arrives_where_it_is_waited_for():
    for name, ranks, microbatches, chunks in CASES:
        schedule = make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
        instructions = of_all_ranks(schedule)
        carry_out(instructions, stages=ranks * chunks)
        for own, tasks, actions in zip(instructions, schedule, in_one_order(schedule), strict=True):
            computed = [i for i in own if isinstance(i, Forward | Backward | BackwardWeight)]
            assert [(i.stage, i.microbatch) for i in computed] == [task[1:] for task in tasks]
            words = {StartReceive: "receive", Send: "send"}
            order = [words.get(type(i), "compute") for i in own if not isinstance(i, FinishReceive)]
            assert order == [action.what.partition("_")[0] for action in actions]


def test_one_backward_of_each_stage_is_the_last():
    for own in of_all_ranks(make_schedule("interleaved", ranks=2, microbatches=4, chunks=2)):
        last = [i for i in own if isinstance(i, Backward) and i.is_last]
        assert len({i.stage for i in last}) == len(last) == 2
        assert {i.microbatch for i in last} == {3}
    halves = of_all_ranks(make_schedule("zero_bubble", ranks=2, microbatches=4))
    assert not any(i.is_last for own in halves for i in own if isinstance(i, Backward))


def test_a_message_that_is_not_sent_is_noticed():
    """The checks above can fail."""
    instructions = of_all_ranks(make_schedule("1f1b", ranks=2, microbatches=4))
    *_, last = [i for i in instructions[0] if isinstance(i, Send)]
    instructions[0].remove(last)
    with pytest.raises(AssertionError, match="deadlock"):
        carry_out(instructions, stages=2)
