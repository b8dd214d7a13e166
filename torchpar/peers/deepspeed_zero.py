"""deepspeed: ZeRO-1, 2 and 3 by `deepspeed.initialize`, with its own defaults but for the size of buckets.

So ZeRO-3 keeps tensors of fewer than 100,000 elements whole on every rank. Source: deepspeed.ai, "Getting
Started"; ZeRO is arXiv 1910.02054.
"""

import dataclasses
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.ops
import numpy as np
import torch
from deepspeed.utils import safe_get_full_grad, safe_get_full_optimizer_state

from compare.contract.inputs import open_stream
from compare.contract.request import Request
from compare.numerics.stream import Batches
from compare.spec.axes import DP_SHARD
from compare.spec.experiment import Experiment
from torchpar.comm import process_groups
from torchpar.comm.collectives import Axis
from torchpar.comm.rank import Rank
from torchpar.model import GPT
from torchpar.parallel_model import ParallelModel, TensorsByName
from torchpar.peers.loop import follow
from torchpar.peers.nanogpt_loop import configure_optimizers
from torchpar.setup import join_mesh, starting_model
from torchpar.state import Run

FLOAT32_BYTES = 4
NEVER = 2**31


class Loop:
    """DeepSpeed's step: forward, backward and step of its engine for every pass.

    Args:
        engine: of `deepspeed.initialize`.
    """

    def __init__(self, engine: Any):
        self._engine = engine

    def gradients(self, inputs_ABT: torch.Tensor, targets_ABT: torch.Tensor) -> torch.Tensor:
        """Forward and backward of every pass. Returns the mean loss over this rank's rows."""
        losses = []
        for inputs_BT, targets_BT in zip(inputs_ABT, targets_ABT, strict=True):
            if losses:
                self._engine.step()  # between two passes it only counts
            _, loss = self._engine(inputs_BT, targets_BT)
            self._engine.backward(loss)
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def update(self, lr: float) -> torch.Tensor:
        """The engine clips, updates, gathers and drops the gradients. Returns the norm () before clipping."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        self._engine.step()
        return torch.as_tensor(self._engine.get_global_grad_norm())


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeRO(ParallelModel):
    """Full tensors of a DeepSpeed engine for the record, by DeepSpeed's own functions for that.

    Attributes:
        engine: of `deepspeed.initialize`.
    """

    engine: Any

    def weights(self) -> TensorsByName:
        """Whole weights by name, in nanoGPT's shapes; all ranks call this together."""
        named = dict(self.module.named_parameters())
        with deepspeed.zero.GatheredParameters(list(named.values())):  # of ZeRO-1 and 2 they are whole
            return {name: parameter.detach().clone() for name, parameter in named.items()}

    def gradients(self) -> TensorsByName:
        """Whole gradients by name, between backward and step; all ranks call this together."""
        return {name: safe_get_full_grad(parameter) for name, parameter in self.module.named_parameters()}

    def moments(self, key: str) -> TensorsByName:
        """Whole moments by name, in nanoGPT's shapes; all ranks call this together."""
        if hasattr(self.engine.optimizer, "_hp_optimizer_states_linked"):
            # ZeRO-1 and 2 link them once, after the first group's step, when the second group has none yet.
            self.engine.optimizer._hp_optimizer_states_linked = False
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()
        named = self.module.named_parameters()
        return {name: safe_get_full_optimizer_state(parameter, key) for name, parameter in named}

    def optimizer_state(self) -> list[torch.Tensor]:
        """This rank's moments, and DeepSpeed's own copy of the updated weights, (n,) each."""
        inner = self.engine.optimizer.optimizer
        masters = [parameter for group in inner.param_groups for parameter in group["params"]]
        entries = [value for entry in inner.state.values() for value in entry.values()]
        return masters + [value for value in entries if torch.is_tensor(value)]

    def held_gradients(self) -> list[torch.Tensor]:
        """This rank's averaged gradients, (n,) each."""
        groups = self.engine.optimizer.averaged_gradients.values()
        return [gradient for group in groups for gradient in group or ()]


def configuration(experiment: Experiment) -> dict[str, Any]:
    """The ds_config.json that a user would write for this experiment."""
    train, layout = experiment.train, experiment.layout
    bucket = int(layout.bucket_mb * 1e6 / FLOAT32_BYTES)  # in elements; half a billion is the default
    return {
        "train_micro_batch_size_per_gpu": train.batch_size // layout.dp_shard,
        "gradient_accumulation_steps": train.gradient_accumulation_steps,
        "gradient_clipping": experiment.optimizer.grad_clip,
        "zero_optimization": {
            "stage": layout.zero,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
        },
        "zero_allow_untested_optimizer": True,  # SGD
        "steps_per_print": NEVER,
    }


def initialize(model: GPT, experiment: Experiment, *, local_rank: int) -> Any:
    """DeepSpeed's engine around the model; the process group must be there."""
    os.environ.setdefault("LOCAL_RANK", str(local_rank))  # where DeepSpeed looks for it, and nowhere else
    # An all-reduce for inference, which DeepSpeed would compile for minutes before the first step.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with process_groups.group_threads():  # DeepSpeed makes a group of its own
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=configure_optimizers(model, experiment.optimizer),
            config=configuration(experiment),
            dist_init_required=False,
        )
    return engine


def train(
    rank: Rank,
    *,
    request: Request,
    folder: Path,
    weights: Mapping[str, np.ndarray] | None = None,
    batches: Batches | None = None,
) -> None:
    """Train as one of `layout.dp_shard` ranks. Arguments as of `torchpar.train.train`."""
    started_utc = datetime.now(UTC).isoformat(timespec="seconds")
    mesh = join_mesh(rank, request)
    model, initial_weights_sha256 = starting_model(request, mesh.device, weights)
    engine = initialize(model, request.experiment, local_rank=rank.local_rank)
    # DeepSpeed communicates in a group of its own over the same ranks.
    shards = mesh[DP_SHARD]
    group = engine.data_parallel_group
    own = Axis(shards.name, size=shards.size, rank=shards.rank, group=group, traffic=mesh.traffic)
    named = dict(model.named_parameters())
    run = Run(
        request=request,
        mesh=dataclasses.replace(mesh, axes={**mesh.axes, DP_SHARD: own}),
        rank=rank,
        corpus=open_stream(request, batches),
        parallel=ZeRO(
            engine=engine,
            module=model,
            optimizer=engine.optimizer,
            parameters={name: getattr(p, "ds_tensor", p) for name, p in named.items()},
        ),
        initial_weights_sha256=initial_weights_sha256,
    )
    follow(run, Loop(engine), folder=folder, started_utc=started_utc)
    process_groups.leave_group()
