"""The trace of a step (`compare.contract.trace`): hooks on the modules, and whole tensors from all ranks.

The model and the training step stay as they are. A hook behind a module's forward keeps a copy of the output
and registers a hook for the output's gradient. A block that backward computes again calls its hooks twice:
the first call counts. In a pipeline a part belongs to the microbatch of the running task.

After the step the ranks give their parts to rank 0, place by place. Along tp a tensor is either split or
copied. The gradient of router weights is a sum over tp: each rank has some inner features of every expert.

Backward of torch-manual and torch-library begins on each rank with the mean loss of its own data. The step's
loss is the mean over these ranks, so gradients are divided by their number, and in float16 by the loss scale.
torch-compiler begins with the mean loss of all data, and its gradients are not divided.

b rows and t positions of a rank, k experts of a token, E experts.
"""

import re
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from compare.contract.record import Recorder
from compare.contract.trace import COPY, LOSS, ROUTER, places, write_trace
from compare.pipeline.schedules import Kind, Task
from compare.side.recording import Observer
from compare.spec.axes import DATA
from torchpar.comm.collectives import unobserved
from torchpar.gpt_stages import GPTStages
from torchpar.measure.parts import join, join_losses, local_array
from torchpar.measure.watch import around_tasks
from torchpar.model import GPT
from torchpar.private import in_backward
from torchpar.run import Run

MODEL = {"transformer.drop": "embedding", "transformer.ln_f": "norm"}
BLOCK = {
    "ln_1": "norm1",
    "attn.c_attn": "attention.qkv",
    "attn.core": "attention.core",
    "attn.c_proj": "attention.out",
    "ln_2": "norm2",
}
DENSE = {"mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}
EXPERTS = {"mlp.choice": ROUTER, "mlp.core": "mlp.experts"}
"""Paths of modules in the model or a block, and the places of their outputs."""
A_BLOCK = re.compile(r"transformer\.h\.(\d+)")


class Output(NamedTuple):
    """A module's output, and a function that copies it, or its gradient, in the form of the trace."""

    tensor: torch.Tensor
    copy: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.clone


Read = Callable[[Any], Output]


def first_of(output: Any) -> Output:
    """A tensor, or the first of several: with experts a block returns the arguments of `Balance`, too."""
    return Output(output[0] if isinstance(output, tuple) else output)


def loss_of(output: Any) -> Output:
    """The mean loss, (): a model returns it behind the logits, the loss's own module alone."""
    return Output(output[1] if isinstance(output, tuple) else output)


def router_weights(output: Any) -> Output:
    """The weights of the chosen experts (b, t, k), to (b, t, E) with 0 for all others."""
    weights_btk, chosen_btk, probability_E = output

    def copy(x_btk: torch.Tensor) -> torch.Tensor:
        return x_btk.new_zeros(*x_btk.shape[:-1], len(probability_E)).scatter(-1, chosen_btk, x_btk)

    return Output(weights_btk, copy)


def traced_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module, Read]]:
    """The places of a rank: name, module, and how to read the module's output."""
    for model in root.modules():
        if not isinstance(model, GPT | GPTStages):
            continue
        modules = dict(model.named_modules())
        yield from ((place, modules[path], first_of) for path, place in MODEL.items() if path in modules)
        for path, block in modules.items():
            if not (match := A_BLOCK.fullmatch(path)):
                continue
            name, second = f"blocks.{match[1]}", EXPERTS if f"{path}.mlp.choice" in modules else DENSE
            for below, place in {**BLOCK, **second}.items():
                read = router_weights if place == ROUTER else first_of
                yield f"{name}.{place}", modules[f"{path}.{below}"], read
            yield f"{name}.residual", block, first_of
        if isinstance(model, GPT) or model.lm_head is not None:
            yield LOSS, model if isinstance(model, GPT) else model.loss, loss_of


class Tracer(Observer):
    """Traces the first step. All ranks take part; rank 0 has the recorder, and writes the files."""

    def __init__(self, run: Run, recorder: Recorder | None):
        self._run, self._recorder, self.watched = run, recorder, run.request.first_step
        self._outputs: dict[str, dict[int, torch.Tensor]] = {}  # by place, and number of pass or microbatch
        self._gradients: dict[str, dict[int, torch.Tensor]] = {}
        self._microbatch: int | None = None

    @contextmanager
    def watch(self) -> Generator[None]:
        """Hook the modules during the step, and write the trace after it."""
        engine, state = self._run.engine, self._run.state
        ranks = 1 if engine.loss_is_global else self._run.mesh.joined(*DATA).size
        scale = state.loss_scale.scale / ranks if state.loss_scale else 1.0
        with ExitStack() as stack:
            if engine.run_pipeline:
                stack.enter_context(around_tasks(self._around_task))
            for place, module, read in traced_modules(engine.module):
                hook = module.register_forward_hook(partial(self._after_forward, place, read))
                stack.callback(hook.remove)
            yield
        with unobserved(), torch.no_grad():
            outputs = dict(self._whole_tensors(self._outputs))
            gradients = dict(self._whole_tensors(self._gradients, scale=scale, ranks=ranks))
        if self._recorder:
            write_trace(self._recorder.folder, self._run.experiment, outputs, gradients)

    @contextmanager
    def _around_task(self, task: Task) -> Generator[None]:
        """Remember the microbatch of the last forward: its loss may be computed after the task."""
        if task.kind is Kind.FORWARD:
            self._microbatch = task.microbatch
        yield

    def _after_forward(self, place: str, read: Read, module: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        tensor, copy = read(output)
        kept = copy(tensor.detach())  # in a recomputation, too: PyTorch compares its operators
        outputs = self._outputs.setdefault(place, {})
        number = self._microbatch if self._run.engine.run_pipeline else len(outputs)
        if in_backward() or number is None or number in outputs:
            return  # a recomputation, or a stage that infers the shapes of its messages
        outputs[number] = kept

        def keep_gradient(gradient: torch.Tensor) -> None:
            gradients = self._gradients.setdefault(place, {})
            if number not in gradients:
                gradients[number] = copy(gradient.detach())

        tensor.register_hook(keep_gradient)

    def _whole_tensors(
        self, tensors: dict[str, dict[int, torch.Tensor]], *, scale: float = 1.0, ranks: int = 1
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Tensors by place, on rank 0; gradients of the mean over `ranks` losses that were multiplied by
        `scale`. Raises RuntimeError: no rank has a place, or the parts leave a gap."""
        experiment, world = self._run.experiment, self._run.mesh.world
        at = [experiment.layout.coordinates(rank) for rank in range(world.size)]
        is_gradient = tensors is self._gradients
        for place in places(experiment):
            mine = tensors.pop(place.name, None)
            part = local_array(mine, place, experiment.train.gradient_accumulation_steps) if mine else None
            everywhere = enumerate(world.all_gather_objects(part))
            if world.rank:
                continue
            parts = {rank: found / scale for rank, found in everywhere if found is not None}
            if place.name == LOSS:
                by_device = join_losses(parts, at, summed=is_gradient)
            else:
                parts = {rank: found / ranks for rank, found in parts.items()}
                summed = is_gradient and place.name.endswith(ROUTER)
                by_device = join(parts, place, at, experiment.layout, summed=summed)
            for device, tensor in by_device.items():
                if not device:
                    yield place.name, tensor
                elif not np.array_equal(tensor, by_device[0], equal_nan=True):
                    yield f"{place.name}{COPY}{device}", tensor
