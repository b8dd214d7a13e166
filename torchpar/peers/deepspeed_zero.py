"""deepspeed: ZeRO-1, 2 and 3 by `deepspeed.initialize`, with its own defaults but for the size of buckets.

So ZeRO-3 keeps tensors of fewer than 100,000 elements whole on every rank. Source: deepspeed.ai, "Getting
Started"; ZeRO is arXiv 1910.02054.
"""

import dataclasses
import os
from typing import Any, cast

import deepspeed
import deepspeed.ops
import torch
from deepspeed.utils import safe_get_full_grad, safe_get_full_optimizer_state

from compare.contract.communication import LOSS
from compare.numerics.optimizer import learning_rate
from compare.spec.axes import DP_SHARD
from compare.spec.experiment import Experiment
from torchpar.comm import process_groups
from torchpar.comm.collectives import Axis, unobserved
from torchpar.comm.mesh import Mesh
from torchpar.launch import Rank
from torchpar.model import GPT
from torchpar.optimizer import make_optimizer
from torchpar.parallel_model import ParallelModel, TensorsByName
from torchpar.run import RankBatch, Run

FLOAT32_BYTES = 4
NEVER = 2**31


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeRO(ParallelModel):
    """An engine of `deepspeed.initialize`; full tensors for the record by DeepSpeed's own functions for that.

    All ranks read weights, gradients and moments together: whole, by name, in nanoGPT's shapes.
    """

    engine: Any

    def weights(self) -> TensorsByName:
        named = dict(self.module.named_parameters())
        with deepspeed.zero.GatheredParameters(list(named.values())):  # of ZeRO-1 and 2 they are whole
            return {name: parameter.detach().clone() for name, parameter in named.items()}

    def gradients(self) -> TensorsByName:
        return {name: safe_get_full_grad(parameter) for name, parameter in self.module.named_parameters()}

    def moments(self, key: str) -> TensorsByName:
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


def compute_gradients(run: Run, batch: RankBatch) -> torch.Tensor:
    """Forward and backward of every pass. Returns the mean loss over the global batch, a scalar."""
    run.rank.at(run.state.step, "forward")
    engine, losses = cast(ZeRO, run.parallel).engine, []
    for inputs_BT, targets_BT in zip(batch.inputs_ABT, batch.targets_ABT, strict=True):
        if losses:
            engine.step()  # between two passes it only counts
        _, loss = engine(inputs_BT, targets_BT)
        engine.backward(loss)
        losses.append(loss.detach())
    mean, shards = torch.stack(losses).mean(), run.mesh[DP_SHARD]
    with unobserved():  # for the record, as our engines send it: no part of DeepSpeed's step
        shards.all_reduce(mean, purpose=LOSS)
    return mean / shards.size


def update_weights(run: Run) -> torch.Tensor:
    """The engine clips, updates, gathers and drops the gradients. Returns the norm () before clipping."""
    engine = cast(ZeRO, run.parallel).engine
    for group in engine.optimizer.param_groups:
        group["lr"] = learning_rate(run.experiment.optimizer, run.state.step)
    engine.step()
    return torch.as_tensor(engine.get_global_grad_norm())


def configuration(experiment: Experiment) -> dict[str, Any]:
    """The ds_config.json that a user would write for this experiment."""
    train, layout = experiment.train, experiment.layout
    size = int(layout.bucket_mb * 1e6 / FLOAT32_BYTES)  # in elements; half a billion is the default
    buckets = {"reduce_bucket_size": size, "allgather_bucket_size": size}
    return {
        "train_micro_batch_size_per_gpu": train.batch_size // layout.dp_shard,
        "gradient_accumulation_steps": train.gradient_accumulation_steps,
        "gradient_clipping": experiment.optimizer.grad_clip,
        "zero_optimization": {"stage": layout.zero, **buckets},
        "zero_allow_untested_optimizer": True,  # SGD
        "steps_per_print": NEVER,
    }


def parallelize(model: GPT, experiment: Experiment, *, mesh: Mesh, rank: Rank) -> tuple[ParallelModel, Mesh]:
    """DeepSpeed's engine around the model, and the mesh with DeepSpeed's group of the same ranks."""
    os.environ.setdefault("LOCAL_RANK", str(rank.local_rank))  # DeepSpeed looks nowhere else
    # An all-reduce for inference, which DeepSpeed would compile for minutes before the first step.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with process_groups.group_threads():  # DeepSpeed makes a group of its own
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=make_optimizer(dict(model.named_parameters()), experiment),
            config=configuration(experiment),
            dist_init_required=False,
        )
    shards, group = mesh[DP_SHARD], engine.data_parallel_group
    axis = Axis(shards.name, size=shards.size, rank=shards.rank, group=group)
    parallel = ZeRO(
        engine=engine,
        module=model,
        optimizer=engine.optimizer,
        parameters={name: getattr(p, "ds_tensor", p) for name, p in model.named_parameters()},
    )
    return parallel, dataclasses.replace(mesh, axes={**mesh.axes, DP_SHARD: axis})
