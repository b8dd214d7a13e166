"""Few spans of many: instructions that follow each other in the same work are one."""

import msgspec

from compare.contract.timeline import Span

LIMIT = 3000
"""Spans of compute on a device: a picture shows no more."""
SMALLEST_GAP_US = 10.0
"""Of some, marking the instructions takes the most."""
LARGEST_GAP_US = 1e4


def merged(lanes: list[list[Span]]) -> tuple[list[list[Span]], float]:
    """The lanes with fewer spans of compute, and the longest gap, in microseconds, that was closed for it.

    Args:
        lanes: each in the order in which its spans begin.
    """
    gap = SMALLEST_GAP_US
    while True:
        found = [_merged(lane, gap) for lane in lanes]
        if gap > LARGEST_GAP_US or all(_computing(lane) <= LIMIT for lane in found):
            return found, gap
        gap *= 2


def _computing(lane: list[Span]) -> int:
    return sum(span.kind != "communication" for span in lane)


def _merged(lane: list[Span], gap: float) -> list[Span]:
    found: list[Span] = []
    at = -1  # of the last span of compute, if no communication has begun since
    for span in lane:
        last = found[at] if at >= 0 else None
        if span.kind == "communication":
            # A break, that waiting is not counted as compute.
            at = -1
        elif last and _work(last) == _work(span) and span.begin_us <= last.end_us + gap:
            end = max(last.end_us, span.end_us)
            found[at] = msgspec.structs.replace(last, duration_us=end - last.begin_us)
            continue
        else:
            at = len(found)
        found.append(span)
    return found


def _work(span: Span) -> tuple[str, int, int]:
    return span.kind, span.microbatch, span.chunk
