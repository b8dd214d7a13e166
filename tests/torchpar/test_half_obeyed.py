"""Engines that obey a setting in a part of what they do: no number shows it, and `strategy` must."""

import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

from compare.contract.record import read_record
from compare.contract.request import REQUEST, Request
from compare.judge.strategy import strategy_of
from compare.spec.experiment import Experiment, edited
from compare.system.json_files import write_json
from tests.support.warm import run_forked

FOUR = {"model": {"n_layer": 4}, "train": {"max_iters": 1, "gradient_accumulation_steps": 2}}


def around(owner: Any, name: str, wrong: Callable) -> AbstractContextManager:
    """In the place of a function or method `wrong`, whose first argument is the right one."""
    right = getattr(owner, name)
    return patch.object(owner, name, lambda *inputs, **options: wrong(right, *inputs, **options))


def in_first_block(module: str) -> AbstractContextManager:
    """Recomputation of one block alone."""
    return around(sys.modules[module], "apply_remat", lambda right, blocks, remat: right(blocks[:1], remat))


def kept_logits() -> AbstractContextManager:
    """The loss in parts, and every part kept for backward."""
    return patch("torchpar.model.checkpoint", lambda part, *inputs, **options: part(*inputs))


def moved_boundary() -> AbstractContextManager:
    """One parameter in the next bucket."""
    from torchpar.manual import data_parallel

    def pack(right, named, limit):
        first, second, *others = right(named, limit)
        return [first[:-1], [first[-1], *second], *others]

    return around(data_parallel, "pack", pack)


def summed_every_pass() -> AbstractContextManager:
    """Each pass's gradients are summed over replicas, and not their sum."""
    from tests.support.torch_runs import spoiled

    def whole(run):
        for parameter in run.engine.module.parameters():
            parameter.register_hook(lambda g, at=parameter.placements: g.redistribute(placements=at))

    return spoiled(whole)


def sequences_in_one_block() -> AbstractContextManager:
    """Only one block's sequences are split."""
    from torchpar.compiler import tensor_parallel

    def split_layers(right, model, devices, *, sequence_parallel):
        right(model, devices, sequence_parallel=False)
        split = tensor_parallel.of_activation(devices, split=tensor_parallel.POSITION_DIM)
        for name in ("attn.c_proj", "mlp.c_proj"):
            model.blocks[0].get_submodule(name).register_forward_hook(
                lambda _, inputs, y: tensor_parallel._at(y, devices, split)
            )
        model.blocks[0].register_forward_hook(
            lambda _, inputs, y: tensor_parallel._at(y, devices, tensor_parallel.of_activation(devices))
        )

    return around(tensor_parallel, "split_layers", split_layers)


def whole_mlp() -> AbstractContextManager:
    """One MLP is never cut."""
    from torchpar import compiler
    from torchpar.compiler.placement import along

    def of_parameters(right, model, devices, *, sharded):
        placements = right(model, devices, sharded=sharded)
        return placements | {name: along(devices) for name in placements if ".h.0.mlp" in name}

    return around(compiler, "of_parameters", of_parameters)


def wide_sums() -> AbstractContextManager:
    """What tp sums is widened before it is sent."""
    from torchpar.compiler import tensor_parallel

    return around(tensor_parallel, "_at", lambda right, x, *where: right(x.float(), *where))


def parts_in_pairs() -> AbstractContextManager:
    """Two parts' logits exist at once, as rows of one product."""
    import torch

    def pairs(*columns, strict):
        return zip(*([torch.cat(x[i : i + 2]) for i in range(0, len(x), 2)] for x in columns), strict=strict)

    return patch(
        "torchpar.model.zip", lambda *columns, strict: pairs(*map(list, columns), strict=strict), create=True
    )


def late_rank() -> AbstractContextManager:
    """One rank reduces after backward."""
    from torchpar.manual.data_parallel import DataParallel

    def forward(right, self, *inputs):
        self._during_backward = self.axis.rank == 0
        return right(self, *inputs)

    return around(DataParallel, "forward", forward)


def never_freed() -> AbstractContextManager:
    """Gathered parameters stay in memory, and are gathered again."""
    from torchpar.manual.flat_parameters import Unit

    def reshard(right, self):
        right(self)
        for flat in self.flats:
            flat.full.untyped_storage().resize_(flat.full.nbytes)

    return around(Unit, "reshard", reshard)


def slice_of_all_reduce() -> AbstractContextManager:
    """Twice the bytes on the wire, and as many by the textbook."""
    from torchpar.comm.collectives import DONE, Axis, chunk_slices

    def start_reduce_scatter(self, piece, full, *, purpose):
        self.all_reduce(full, purpose=purpose)
        piece.copy_(full[chunk_slices(len(full), self.size)[self.rank]])
        return DONE

    return patch.object(Axis, "start_reduce_scatter", start_reduce_scatter)


def block_in_the_root() -> AbstractContextManager:
    """One block is gathered with the embeddings, once a pass."""
    from torchpar.library import fully_sharded
    from torchpar.model import Block

    seen = []

    def fully_shard(right, module, **options):
        seen.append(module)
        return None if isinstance(module, Block) and len(seen) == 1 else right(module, **options)

    return around(fully_sharded, "fully_shard", fully_shard)


def gathered_logits() -> AbstractContextManager:
    """The loss is of whole logits on every rank of tp."""
    from torch import nn

    from torchpar.manual import megatron

    def forward(self, logits_NV, targets_N):
        whole = megatron.gather_parts(logits_NV, self.axis, "loss")
        whole[self.axis.rank] = logits_NV
        return nn.functional.cross_entropy(megatron.torch.cat(whole, dim=-1)[:, : self.vocab_size], targets_N)

    return patch.object(megatron.VocabParallelCrossEntropy, "forward", forward)


def gpipe_in_second_replica() -> AbstractContextManager:
    """Ranks of another replica do their tasks in another order."""
    import torch.distributed as dist

    from torchpar.manual import pipeline_parallel

    def make_schedule(right, name, **sizes):
        return right(name if dist.get_rank() < 2 else "gpipe", **sizes)

    return around(pipeline_parallel, "make_schedule", make_schedule)


def whole_backward() -> AbstractContextManager:
    """Weight gradients are made at once, and their own task does nothing."""
    from torchpar.manual.stage import Stage, add_up

    def backward(right, self, microbatch, gradient):
        of_input = right(self, microbatch, gradient)
        while self.factors[microbatch]:
            add_up(self.factors[microbatch].pop())
        return of_input

    return around(Stage, "backward", backward)


def tied_sum_in_16_bits() -> AbstractContextManager:
    """Both copies' gradients are rounded to be sent."""
    from torchpar.comm.collectives import Axis

    send, receive = Axis.start_send, Axis.start_receive

    def start_send(self, tensor, *, to, purpose):
        tensor = tensor.bfloat16() if purpose == "tied gradients" else tensor
        return send(self, tensor, to=to, purpose=purpose)

    def start_receive(self, tensor, *, source):
        if tensor.dim() != 2:
            return receive(self, tensor, source=source)
        rounded = tensor.bfloat16()
        receive(self, rounded, source=source).wait()
        tensor.copy_(rounded)
        return SimpleNamespace(wait=lambda: None)

    return patch.multiple(Axis, start_send=start_send, start_receive=start_receive)


class Deed(NamedTuple):
    """What an engine was asked for, what it does, and the words that say so, a line each; none if right."""

    engine: str
    asked: dict
    says: str = ""
    plant: Callable[[], AbstractContextManager] = nullcontext
    done: Mapping = MappingProxyType({})


MANUAL, LIBRARY, COMPILER = "torch-manual", "torch-library", "torch-compiler"
DDP, FSDP = {"dp_replicate": 2}, {"dp_shard": 2, "zero": 3}
BUCKETS, IN_PARTS = {"layout": DDP | {"bucket_mb": 0.01}}, {"train": {"loss_chunks": 4}}
PIPELINE, TP = {"pp": 2, "microbatches": 2}, {"layout": {"tp": 2}}
PADDED = {"model": {"vocab_size": 37}, "data": {"source": "synthetic"}}
HALVED = PIPELINE | {"schedule": "zero_bubble"}
BFLOAT16 = {"precision": {"dtype": "bfloat16"}}
COMPILED = BFLOAT16 | IN_PARTS | {"layout": DDP | {"compile": "aot_eager", "remat": "dots"}}
UNCOMPILED = {"precision": {"dtype": "float32"}, "train": {"loss_chunks": 1}}
OTHERWISE = """layout.compile = inductor was asked for, and aot_eager was done
precision.dtype = bfloat16
layout.remat = dots was asked for, and none was done
train.loss_chunks = 4 was asked for, and 1"""
ONE_BLOCK, GELUS = (
    "layout.remat = full was asked for, and 16 of ",
    "layout.remat = dots was asked for, and 0 of ",
)
DEEDS = {
    "one block again": Deed(
        MANUAL, {"layout": DDP | {"remat": "full"}}, ONE_BLOCK, lambda: in_first_block("torchpar.manual")
    ),
    "one block's GELUs again": Deed(
        LIBRARY, {"layout": DDP | {"remat": "dots"}}, GELUS, lambda: in_first_block("torchpar.library")
    ),
    "kept logits": Deed(MANUAL, IN_PARTS, "4, whose logits are kept", kept_logits),
    "pairs of parts": Deed(MANUAL, IN_PARTS, "4, and 2 products for them in a pass", parts_in_pairs),
    "moved boundary": Deed(MANUAL, BUCKETS, "with other parameters in each", moved_boundary),
    "late rank": Deed(MANUAL, BUCKETS, "all-reduces after backward", late_rank),
    "every pass": Deed(COMPILER, {"layout": DDP}, "of reduce over dp_replicate", summed_every_pass),
    "sequences": Deed(
        COMPILER,
        {"layout": {"tp": 2, "sequence_parallel": True}},
        "of gather over tp",
        sequences_in_one_block,
    ),
    "whole MLP": Deed(COMPILER, {"layout": FSDP}, "parameters off by\nover dp_shard", whole_mlp),
    "never freed": Deed(MANUAL, {"layout": FSDP}, "parameters off by +200%", never_freed),
    "slices": Deed(
        MANUAL,
        {"layout": FSDP | {"zero": 2}},
        "of all_reduce over dp_shard for gradients",
        slice_of_all_reduce,
    ),
    "block in the root": Deed(
        LIBRARY, PADDED | {"layout": FSDP}, "of gather over dp_shard", block_in_the_root
    ),
    "padded": Deed(LIBRARY, PADDED | {"layout": FSDP}),
    "gathered logits": Deed(MANUAL, PADDED | TP, "of all_gather over tp for loss", gathered_logits),
    "GPipe in a replica": Deed(
        MANUAL, {"layout": PIPELINE | DDP}, "and gpipe was done", gpipe_in_second_replica
    ),
    "whole backward": Deed(
        MANUAL, {"layout": HALVED}, "zero_bubble was asked for, and another order", whole_backward
    ),
    "halves of backward": Deed(MANUAL, {"layout": HALVED | DDP | {"bucket_mb": 0.01}}),
    "tied sum": Deed(
        MANUAL,
        BFLOAT16 | {"layout": PIPELINE},
        "dtype of gradients that are sent = float32",
        tied_sum_in_16_bits,
    ),
    "replicas of shards": Deed(COMPILER, {"layout": {"dp_replicate": 2, "dp_shard": 2, "zero": 1}}),
    "sums in 16 bits": Deed(COMPILER, BFLOAT16 | TP),
    "wide sums": Deed(COMPILER, BFLOAT16 | TP, "of reduce over tp", wide_sums),
    "compiled": Deed(COMPILER, COMPILED),
    "compiled otherwise": Deed(
        COMPILER,
        COMPILED | {"layout": COMPILED["layout"] | {"compile": "inductor"}},
        OTHERWISE,
        done=UNCOMPILED | {"layout": {"remat": "none", "compile": "aot_eager"}},
    ),
}
"""Each in float64 unless it says so, with four layers in two passes."""


def do_all(folder: Path, tiny: Experiment) -> int:
    """Run them, and leave their records. Returns the exit code."""
    from torchpar.__main__ import run

    failed = 0
    for name, deed in DEEDS.items():
        (folder / name).mkdir()
        asked = edited(tiny, deed.asked)
        write_json(folder / name / REQUEST, Request(engine=deed.engine, experiment=asked))
        with deed.plant():
            try:
                run(Request(engine=deed.engine, experiment=edited(asked, deed.done)), folder / name, None)
            except Exception:
                failed += 1
                traceback.print_exc()
    return failed


def test_what_is_half_obeyed_is_red(tmp_path, tiny):
    done = run_forked(do_all, tmp_path, edited(tiny, FOUR))
    assert done.returncode == 0, done.stdout + done.stderr
    for name, deed in DEEDS.items():
        said = "; ".join(strategy_of(read_record(tmp_path / name)).objections)
        assert bool(said) == bool(deed.says), (name, said)
        assert all(words in said for words in deed.says.splitlines()), (name, said)
