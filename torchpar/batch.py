"""One rank's rows and positions of a global batch, and whole batches gathered from all ranks.

A passes, B rows, T positions.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch

from compare.numerics.context import order_of_positions
from compare.spec.axes import CP, DATA, ROWS
from compare.spec.experiment import Layout
from torchpar.comm.mesh import Mesh


class RankBatch(NamedTuple):
    """One rank's rows and positions of a global batch, on its device."""

    inputs_ABT: torch.Tensor
    """int64."""
    targets_ABT: torch.Tensor
    keys_AB2: torch.Tensor | None = None
    """Keys of the sequences, for dropout: the bits of two words as int32."""

    def passes(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Arguments of the model in each pass: inputs, targets (B, T), keys (B, 2) or None."""
        for number, (inputs_BT, targets_BT) in enumerate(zip(*self[:2], strict=True)):
            yield inputs_BT, targets_BT, None if self.keys_AB2 is None else self.keys_AB2[number]


def shard_batch(arrays: Mapping[str, np.ndarray], layout: Layout, mesh: Mesh) -> RankBatch:
    """This rank's rows and positions of a step's arrays: (A, B, T) -> (A, B / ranks of rows, T / cp)."""
    data, context, device = mesh.joined(*ROWS), mesh[CP], mesh.device

    def shard(array_AB: np.ndarray) -> torch.Tensor:
        count = array_AB.shape[1] // data.size
        rows = array_AB[:, data.rank * count : (data.rank + 1) * count]
        is_key = rows.dtype == np.uint32
        if context.size > 1 and not is_key:  # a key belongs to the whole sequence
            order_T = order_of_positions(rows.shape[-1], layout)
            rows = rows[..., np.split(order_T, context.size)[context.rank]]
        # PyTorch looks up int64, and has no arithmetic of unsigned words.
        tensor = torch.from_numpy(rows.view(np.int32) if is_key else rows.astype(np.int64))
        if device.type == "cuda":  # a copy from pinned memory does not wait for earlier kernels
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    return RankBatch(*(shard(arrays[name]) for name in ("inputs", "targets", "keys") if name in arrays))


def gather_batch(tensors: Mapping[str, torch.Tensor], mesh: Mesh) -> dict[str, np.ndarray]:
    """Whole arrays (A, B, T, ..), int32, from the parts of all ranks, T by rank. Keys are (A, B, 2)."""
    local = {name: tensor.cpu().numpy() for name, tensor in tensors.items()}
    everywhere, parts_of_T = mesh.joined(*DATA).all_gather_objects(local), mesh[CP].size
    whole = {}
    for name in tensors:
        parts = [of_rank[name] for of_rank in everywhere]
        if name == "keys":  # equal on all ranks of a sequence
            rows = parts[::parts_of_T]
        else:
            sequences = (parts[first : first + parts_of_T] for first in range(0, len(parts), parts_of_T))
            rows = [np.concatenate(chunks, axis=2) for chunks in sequences]
        whole[name] = np.concatenate(rows, axis=1).astype(np.int32)
    return whole
