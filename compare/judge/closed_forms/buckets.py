"""Overhead of data parallelism over gradient buckets, in closed form: what a step costs beyond its passes.

    s    bytes of gradients                  w    bytes/s of a large all-reduce
    n    buckets, of s / n bytes each        o    seconds of an all-reduce beyond its bytes

A bucket leaves as soon as backward has filled it; collectives run one after the other, each for
s / (n w) + o.

    overlapped    backward takes s / (n w) a bucket: the first is full after that, and from then
                  on the network is the slower by o a bucket                        s / (n w) + n o
    hidden        backward takes s / (n w) + o a bucket, or longer: only the last
                  one is waited for                                                 s / (n w) + o
    exposed       nothing runs beside backward, as without an idle core: all are
                  waited for                                                        s / w + n o

The first has a best n: sqrt(s / (w o)), buckets of sqrt(s w o) bytes, and an overhead of 2 sqrt(s o / w).
In the second more buckets are better; in the third one is best.

Source: buckets and overlap as in PyTorch's DDP (Li et al., arXiv 2006.15704, sections 3.2.2 and 3.2.3); the
forms follow from the sentences above, and a test holds them against a clock that carries these out.
"""

import math

from compare.numerics.parameters import parameter_table
from compare.spec.experiment import Model


def overlapped_s(size: float, buckets: float, *, bandwidth: float, latency_s: float) -> float:
    """Seconds beyond backward where it takes as long for a bucket as its bytes do.

    Args:
        size: bytes of gradients.
        buckets: their number.
        bandwidth: bytes/s of the all-reduce, of logical bytes.
        latency_s: seconds of a collective beyond its bytes.
    """
    return size / (buckets * bandwidth) + buckets * latency_s


def hidden_s(size: float, buckets: float, *, bandwidth: float, latency_s: float) -> float:
    """Seconds beyond backward where it is slower than the network. Arguments as for `overlapped_s`."""
    return size / (buckets * bandwidth) + latency_s


def exposed_s(size: float, buckets: float, *, bandwidth: float, latency_s: float) -> float:
    """Seconds beyond backward where nothing runs beside it. Arguments as for `overlapped_s`."""
    return size / bandwidth + buckets * latency_s


def best_buckets(size: float, *, bandwidth: float, latency_s: float) -> float:
    """The number of buckets with the least `overlapped_s`: at least 1; infinite without latency."""
    if latency_s == 0:
        return math.inf
    return max(math.sqrt(size / (bandwidth * latency_s)), 1.0)


def bucket_sizes(model: Model, *, limit: float, itemsize: int) -> list[int]:
    """Bytes of each bucket: parameters in reverse, a bucket closed before it would pass the limit.

    Args:
        model: its parameters.
        limit: bytes; infinity for one bucket, 0 for one a parameter.
        itemsize: bytes of a gradient's element.
    """
    sizes: list[int] = []
    for parameter in reversed(parameter_table(model)):
        size = parameter.size * itemsize
        if sizes and sizes[-1] + size <= limit:
            sizes[-1] += size
        else:
            sizes.append(size)
    return sizes
