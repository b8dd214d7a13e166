"""The work of a step: dtypes of products, recomputed operators, and the tasks of a pipeline."""

import re
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import numpy as np
import torch
from torch import nn

from compare.contract.communication import ACTIVATION_GRADIENTS, ACTIVATIONS, GRADIENTS
from compare.contract.work import Kept, ObservedWork, Part
from compare.pipeline.schedules import Kind, Task
from compare.spec.axes import CP, REPLICAS, parts_of
from torchpar.comm.collectives import Call
from torchpar.measure.watch import HEAD, Sink, modules_named
from torchpar.private import FakeTensor, running_node_number, tree_leaves

PRODUCTS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "linear", "addmm_", "baddbmm_", "_grouped_mm"}
)
FUNCTIONS = frozenset({"gelu", "relu"})
SPARE_BITS = {"bfloat16": 16, "float16": 13}
"""The last bits of a float32 that are 0 if it fits into 16 bits."""
CORE, CHOICE, NORM = r"\.attn\.core$", r"\.mlp\.choice$", r"\.ln_[12f]$"
"""Ends of the paths of the modules that compute attention, that choose experts, and of norms."""
KEPT: dict[Kept, tuple[re.Pattern[str], frozenset[str]]] = {
    "norm": (re.compile(NORM), frozenset()),
    "router": (re.compile(CHOICE), frozenset()),
    "rotation": (re.compile(r"\.attn\.rotation$"), frozenset({"mul", "sub", "add"})),
    "residual": (re.compile(r"\bh\.\d+$"), frozenset({"add", "_to_copy"})),
    "softmax": (re.compile(CORE), frozenset({"_softmax", "logsumexp", "logaddexp", "sigmoid", "lerp_"})),
    "loss": (re.compile(""), frozenset({"_log_softmax", "log"})),
}
"""Path of the module, and names of its operators; without names all operators count, and what they read."""
HOPS = {ACTIVATIONS: "hw", ACTIVATION_GRADIENTS: "gv"}
"""The letters of a hop and of its wait in `ObservedWork.rings`."""
ATTENTION = re.compile("scaled_dot_product|efficient_attention_")
"""A part of the names of fused kernels, each with two products."""


class WorkSink(Sink):
    """Records the work of a model whose `lm_head` makes logits. `task` records the tasks of a pipeline."""

    def __init__(self, module: nn.Module):
        self._products, self._positions = Counter[str](), set[int]()
        self._forward, self._again = Counter[Part](), Counter[Part]()
        self._tasks, self._messages = list[str](), list[tuple[int, bool]]()
        self._heads, self._in_head = modules_named(HEAD, module), 0
        self._kept = defaultdict[Kept, set[str]](set)
        self._rings = defaultdict[tuple[str, int], str](str)  # by the phase and the number of a run
        self._attention = set[str]()
        self._modules = 0

    def operator(self, func: Any, operands: tuple, result: Any) -> None:
        name = func.overloadpacket.__name__
        is_product = name in PRODUCTS or bool(ATTENTION.search(name))
        of_router = is_product and re.search(CHOICE, self.watch.module)
        for what, (place, names) in KEPT.items() if not self.watch.in_backward else ():
            if (name in names or not names) and place.search(self.watch.module):
                tensors = [x for x in tree_leaves((result, () if names else operands)) if _is_real(x)]
                self._kept[what] |= {_name_of(x.dtype) for x in tensors}
                if what == "rotation" and name == "mul":  # by cosines or sines
                    self._kept[what] |= {
                        self._needed_dtype(x) for x in operands[0] if x.dtype == torch.float32
                    }
        if self.watch.runs_forward and not self.watch.in_backward:
            if ATTENTION.search(name):
                self._attention.add(name)
            elif name == "_softmax" and re.search(CORE, self.watch.module):
                self._attention.add(" x ".join(map(str, result.shape[-2:])))
        if of_router or (not is_product and name not in FUNCTIONS):
            return
        first = next(leaf for leaf in tree_leaves(operands) if isinstance(leaf, torch.Tensor))
        if isinstance(first, FakeTensor):
            return  # in a first step DTensor computes the shapes of results
        if is_product:
            self._products[_dtype_of(first)] += 1
            self._note_ring("p")
        if name in FUNCTIONS or (is_product and self.watch.runs_forward):
            of_product: Part = "logits" if self._in_head else "products"
            part: Part = "activations" if name in FUNCTIONS else of_product
            (self._again if self.watch.in_backward else self._forward)[part] += 1

    def call(self, call: Call, full: torch.Tensor, ranks: int) -> None:
        is_of_gradients = (call.kind, call.purpose) == ("all_reduce", GRADIENTS)
        if is_of_gradients and set(parts_of(call.axis)) <= {*REPLICAS}:
            self._messages.append((full.nbytes, self.watch.in_backward))
        if (call.kind, call.axis) == ("permute", CP):
            self._note_ring(HOPS[call.purpose][0])
            if call.purpose == ACTIVATION_GRADIENTS:
                self._kept["ring"].add(self._needed_dtype(full))

    def wait(self, call: Call) -> None:
        self._note_ring(HOPS[call.purpose][1])

    def _note_ring(self, letter: str) -> None:
        """Append to the order of the attention core that runs; several products are one letter."""
        if re.search(CORE, self.watch.module):
            in_forward = self.watch.runs_forward
            run = ("forward", self._modules) if in_forward else ("backward", running_node_number() or 0)
            self._rings[run] += letter * (letter != "p" or not self._rings[run].endswith("p"))

    def _needed_dtype(self, x: torch.Tensor) -> str:
        """The dtype of x, or the dtype of products if x is float32 and most entries but zeros fit into it."""
        if x.dtype == torch.float32 and not isinstance(x, FakeTensor):
            bits = x.detach().cpu().numpy().view(np.int32)  # in NumPy: the watch would see operators
            bits = bits[bits != 0]
            for narrow in SPARE_BITS.keys() & self._products.keys():
                if (bits % 2 ** SPARE_BITS[narrow] == 0).sum() > len(bits) / 2:
                    return narrow
        return _name_of(x.dtype)

    def enter(self, module: nn.Module) -> None:
        self._modules += 1
        self._in_head += id(module) in self._heads

    def leave(self, module: nn.Module, output: Any) -> None:
        if id(module) in self._heads:
            self._in_head -= 1
            if output is not None and not self.watch.in_backward:
                self._positions.add(output.shape[1])  # of logits_BTV

    def result(self) -> ObservedWork:
        """The work of this rank's step, after its end."""
        return ObservedWork(
            products=dict(self._products),
            forward=dict(self._forward),
            again=dict(self._again),
            logits_positions=sorted(self._positions),
            gradient_messages=[self._messages] if self._messages else [],
            kept={kept: sorted(dtypes) for kept, dtypes in self._kept.items()},
            attention=sorted(self._attention),
            rings=sorted({order for order in self._rings.values() if "h" in order}),
            tasks=[self._tasks] if self._tasks else [],
        )

    @contextmanager
    def task(self, task: Task) -> Generator[None]:
        """Entered around a task of a pipeline. A task of weight gradients counts only if it multiplies."""
        before = self._products.total()
        yield
        if task.kind is not Kind.BACKWARD_WEIGHT or self._products.total() > before:
            self._tasks.append(str(task))


def of_all_ranks(ranks: Sequence[ObservedWork], *, stages: Sequence[int]) -> ObservedWork:
    """The work of all ranks, in the order of the mesh. Messages and tasks are from one rank of each
    stage: the first rank, or the first rank that differs from it."""

    def by_stage(of_ranks: Sequence[list[Any]]) -> list[Any]:
        found: list[Any] = []
        for stage in range(max(stages) + 1):
            first, *others = (of_rank for of_rank, of in zip(of_ranks, stages, strict=True) if of == stage)
            found += next((other for other in others if other != first), first)
        return found

    def total(counts: Iterable[dict[Any, int]]) -> dict[Any, int]:
        return dict(sum(map(Counter, counts), Counter()))

    return ObservedWork(
        products=total(rank.products for rank in ranks),
        forward=total(rank.forward for rank in ranks),
        again=total(rank.again for rank in ranks),
        logits_positions=sorted({positions for rank in ranks for positions in rank.logits_positions}),
        gradient_messages=by_stage([rank.gradient_messages for rank in ranks]),
        kept={of: sorted({x for rank in ranks for x in rank.kept.get(of, [])}) for of in get_args(Kept)},
        attention=sorted({each for rank in ranks for each in rank.attention}),
        rings=sorted({order for rank in ranks for order in rank.rings}),
        compiled=ranks[0].compiled,
        tasks=by_stage([rank.tasks for rank in ranks]),
    )


def _dtype_of(factor: torch.Tensor) -> str:
    """The dtype in which a product multiplies a factor: on a GPU float32 may become TF32."""
    is_rounded = factor.is_cuda and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if factor.dtype == torch.float32 and is_rounded else _name_of(factor.dtype)


def _is_real(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
