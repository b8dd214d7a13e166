"""Engines that obey a setting in a part of what they do: no number shows it, and `strategy` must."""

import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from unittest.mock import patch

from warm import run_forked

from compare.contract.record import read_record
from compare.contract.request import REQUEST, Request
from compare.host.json_files import write_json
from compare.judge.strategy import strategy_of
from compare.spec.experiment import Experiment, edited

FOUR = {"model": {"n_layer": 4}, "train": {"max_iters": 1, "gradient_accumulation_steps": 2}}


def in_first_block(module: str) -> AbstractContextManager:
    """Recomputation of one block alone."""
    owner = sys.modules[module]
    right = owner.apply_remat
    return patch.object(owner, "apply_remat", lambda blocks, remat: right(blocks[:1], remat))


def kept_logits() -> AbstractContextManager:
    """The loss in parts, and every part kept for backward."""
    return patch("torchpar.model.checkpoint", lambda part, *inputs, **options: part(*inputs))


def moved_boundary() -> AbstractContextManager:
    """One parameter in the next bucket."""
    from torchpar.manual import data_parallel

    right = data_parallel.pack

    def pack(named, limit):
        first, second, *others = right(named, limit)
        return [first[:-1], [first[-1], *second], *others]

    return patch.object(data_parallel, "pack", pack)


def first_bucket_alone() -> AbstractContextManager:
    """The first bucket leaves within backward, and the others after it."""
    from torchpar.manual.data_parallel import DataParallel

    right = DataParallel.gradient_ready

    def gradient_ready(self, bucket, index, parameter):
        self._during_backward = self.buckets.taken == 0
        right(self, bucket, index, parameter)

    return patch.object(DataParallel, "gradient_ready", gradient_ready)


def summed_every_pass() -> AbstractContextManager:
    """Each pass's gradients are summed over replicas, and not their sum."""
    from torchpar.faults import spoiled

    def whole(run):
        for parameter in run.parallel.module.parameters():
            parameter.register_hook(lambda g, at=parameter.placements: g.redistribute(placements=at))

    return spoiled(whole)


def sequences_in_one_block() -> AbstractContextManager:
    """Only one block's sequences are split."""
    from torchpar.compiler import tensor_parallel

    right = tensor_parallel.split_layers

    def split_layers(model, devices, *, sequence_parallel):
        right(model, devices, sequence_parallel=False)
        split = tensor_parallel.of_activation(devices, split=tensor_parallel.POSITION_DIM)
        for name in ("attn.c_proj", "mlp.c_proj"):
            model.blocks[0].get_submodule(name).register_forward_hook(
                lambda _, inputs, y: tensor_parallel._at(y, devices, split)
            )
        model.blocks[0].register_forward_hook(
            lambda _, inputs, y: tensor_parallel._at(y, devices, tensor_parallel.of_activation(devices))
        )

    return patch.object(tensor_parallel, "split_layers", split_layers)


def whole_mlp() -> AbstractContextManager:
    """One MLP is never cut."""
    from torchpar import compiler
    from torchpar.compiler.placement import along

    right = compiler.of_parameters

    def of_parameters(model, devices, *, sharded):
        placements = right(model, devices, sharded=sharded)
        return placements | {name: along(devices) for name in placements if ".h.0.mlp" in name}

    return patch.object(compiler, "of_parameters", of_parameters)


def one_block_gathered_again() -> AbstractContextManager:
    """The weights of all blocks but one are kept for backward."""
    from torchpar.compiler import fully_sharded

    right, seen = fully_sharded.gathered_again, []

    def gathered_again(forward, devices):
        seen.append(forward)
        return right(forward, devices) if len(seen) == 1 else forward

    return patch.object(fully_sharded, "gathered_again", gathered_again)


def wide_sums() -> AbstractContextManager:
    """What tp sums is widened before it is sent."""
    from torchpar.compiler import tensor_parallel

    right = tensor_parallel._at
    return patch.object(tensor_parallel, "_at", lambda x, *where: right(x.float(), *where))


class Deed(NamedTuple):
    """What an engine was asked for, what it does, and the words that say so; none if that is right."""

    engine: str
    asked: dict
    says: tuple[str, ...]
    plant: Callable[[], AbstractContextManager] = nullcontext
    done: Mapping = MappingProxyType({})


DDP, FSDP = {"dp_replicate": 2}, {"dp_shard": 2, "zero": 3}
BUCKETS = {"layout": DDP | {"bucket_mb": 0.01}}
BFLOAT16 = {"precision": {"dtype": "bfloat16"}}
COMPILED = BFLOAT16 | {"layout": DDP | {"compile": "aot_eager", "remat": "dots"}, "train": {"loss_chunks": 4}}
UNCOMPILED = {"precision": {"dtype": "float32"}, "layout": {"remat": "none"}, "train": {"loss_chunks": 1}}
DEEDS = {
    "one block again": Deed(
        "torch-manual",
        {"layout": DDP | {"remat": "full"}},
        ("layout.remat = full was asked for, and 16 of ",),
        lambda: in_first_block("torchpar.manual"),
    ),
    "one block's GELUs again": Deed(
        "torch-library",
        {"layout": DDP | {"remat": "dots"}},
        ("layout.remat = dots was asked for, and 0 of ",),
        lambda: in_first_block("torchpar.library"),
    ),
    "kept logits": Deed(
        "torch-manual", {"train": {"loss_chunks": 4}}, ("4, whose logits are kept",), kept_logits
    ),
    "moved boundary": Deed("torch-manual", BUCKETS, ("with other parameters in each",), moved_boundary),
    "first bucket": Deed("torch-manual", BUCKETS, ("partly within backward",), first_bucket_alone),
    "every pass": Deed(
        "torch-compiler", {"layout": DDP}, ("of reduce over dp_replicate",), summed_every_pass
    ),
    "sequences": Deed(
        "torch-compiler",
        {"layout": {"tp": 2, "sequence_parallel": True}},
        ("of gather over tp",),
        sequences_in_one_block,
    ),
    "whole MLP": Deed("torch-compiler", {"layout": FSDP}, ("parameters off by", "over dp_shard"), whole_mlp),
    "gathered once": Deed(
        "torch-compiler", {"layout": FSDP}, ("of gather over dp_shard",), one_block_gathered_again
    ),
    "sums in 16 bits": Deed("torch-compiler", BFLOAT16 | {"layout": {"tp": 2}}, ()),
    "wide sums": Deed("torch-compiler", BFLOAT16 | {"layout": {"tp": 2}}, ("of reduce over tp",), wide_sums),
    "compiled": Deed("torch-compiler", COMPILED, ()),
    "compiled otherwise": Deed(
        "torch-compiler",
        COMPILED | {"layout": COMPILED["layout"] | {"compile": "inductor"}},
        (
            "layout.compile = inductor was asked for, and aot_eager was done",
            "precision.dtype = bfloat16",
            "layout.remat = dots was asked for, and none was done",
            "train.loss_chunks = 4 was asked for, and 1",
        ),
        done=UNCOMPILED | {"layout": UNCOMPILED["layout"] | {"compile": "aot_eager"}},
    ),
}
"""Each in float64 unless it says so, with four layers in two passes."""


def do_all(folder: Path, tiny: Experiment) -> int:
    """Run them, and leave their records. Returns the exit code."""
    from torchpar.train import start_ranks

    failed = 0
    for name, deed in DEEDS.items():
        (folder / name).mkdir()
        asked = edited(tiny, deed.asked)
        write_json(folder / name / REQUEST, Request(engine=deed.engine, experiment=asked))
        with deed.plant():
            try:
                start_ranks(Request(engine=deed.engine, experiment=edited(asked, deed.done)), folder / name)
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
        assert all(words in said for words in deed.says), (name, said)
