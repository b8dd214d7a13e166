"""Names that users write, and the nearest names that exist."""

import difflib
import re
from collections.abc import Iterable

KNOWN_AS = {
    # Layouts, as FSDP, DeepSpeed, Megatron-LM and torchtitan call them.
    **dict.fromkeys(("dp", "data", "data_parallel", "replicate", "no_shard"), ("ddp",)),
    **dict.fromkeys(("zero", "zero3", "zero_3", "stage3", "full_shard", "fully_sharded"), ("fsdp",)),
    **dict.fromkeys(("fsdp1", "fsdp2", "fully_shard", "dp_shard"), ("fsdp",)),
    **dict.fromkeys(("zero_1", "stage1", "distributed_optimizer"), ("zero1",)),
    **dict.fromkeys(("zero_2", "stage2"), ("zero2",)),
    **dict.fromkeys(("hybrid_shard", "hybrid", "mics"), ("hsdp",)),
    **dict.fromkeys(("tensor", "tensor_parallel", "megatron"), ("tp",)),
    **dict.fromkeys(("sp", "sequence_parallel", "megatron_sp"), ("tp_sp",)),
    **dict.fromkeys(("context", "context_parallel"), ("cp",)),
    **dict.fromkeys(("ring", "ring_attention"), ("cp_ring",)),
    "ulysses": ("cp_ulysses",),
    **dict.fromkeys(("expert", "expert_parallel", "moe"), ("ep", "experts")),
    **dict.fromkeys(("pipeline", "pipeline_parallel", "1f1b"), ("pp",)),
    "gpipe": ("pp_gpipe",),
    "interleaved": ("pp_interleaved",),
    **dict.fromkeys(("zero_bubble", "zb", "zb_h1"), ("pp_zero_bubble",)),
    **dict.fromkeys(("3d", "tp_pp_dp"), ("ddp_tp_pp",)),
    # Engines, as their frameworks call them.
    **dict.fromkeys(("jit", "gspmd", "pjit", "shardy"), ("jax-compiler",)),
    **dict.fromkeys(("shard_map", "pmap"), ("jax-manual",)),
    "sharding_in_types": ("jax-explicit",),
    **dict.fromkeys(("distributed", "c10d", "nccl"), ("torch-manual",)),
    **dict.fromkeys(("torch_fsdp", "torch_ddp"), ("torch-library",)),
    **dict.fromkeys(("dtensor", "torch_compile"), ("torch-compiler",)),
    # Commands.
    **dict.fromkeys(("train", "start"), ("run",)),
    **dict.fromkeys(("continue", "restart"), ("resume",)),
    **dict.fromkeys(("test", "verify", "prove"), ("check",)),
    **dict.fromkeys(("benchmark", "time", "tune"), ("bench",)),
    **dict.fromkeys(("generate", "infer"), ("sample",)),
    **dict.fromkeys(("compare", "matrix"), ("diff", "check")),
    **dict.fromkeys(("export", "import"), ("convert",)),
    **dict.fromkeys(("show", "runs"), ("report",)),
    # Flags of nanoGPT, torchrun and others.
    "lr": ("learning_rate",),
    **dict.fromkeys(("gpus", "n_gpus", "world_size", "nproc_per_node"), ("devices",)),
    **dict.fromkeys(("nodes", "nnodes"), ("hosts",)),
    **dict.fromkeys(("steps", "max_steps", "iters"), ("max_iters",)),
    **dict.fromkeys(("out_dir", "output_dir"), ("run_dir", "source")),
    **dict.fromkeys(("dataset", "data_dir"), ("data.source",)),
    "max_new_tokens": ("tokens",),
    "num_samples": ("samples",),
    "device": ("platform",),
}
"""Names of other programs -> names of shardpair, of any kind."""

LEAST = 0.7
"""Least similarity of a name that an error suggests."""


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """The known names that a word may mean, at most three; a field's name also stands for `section.field`."""
    by_key: dict[str, list[str]] = {}
    for name in known:
        for part in dict.fromkeys((name, name.rpartition(".")[2])):
            by_key.setdefault(_key(part), []).append(name)
    for other, meant in KNOWN_AS.items():
        if names := [name for here in meant for name in by_key.get(_key(here), ())]:
            by_key.setdefault(other, names)
    key = _key(word)
    begin = {name: "" for found, names in by_key.items() if found.startswith(key) for name in names}
    if key in by_key:
        return by_key[key][:3]
    if len(key) > 2 and 0 < len(begin) <= 3:
        return list(begin)
    return [name for found in difflib.get_close_matches(key, by_key, 1, LEAST) for name in by_key[found][:1]]


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """`; did you mean fsdp?`, to end a message about an unknown name, or '' if no name is near."""
    names = [prefix + name for name in nearest(word, known)]
    return f"; did you mean {' or '.join(names)}?" if names else ""


def _key(name: str) -> str:
    return re.sub(r"[-. ]", "_", name.casefold())
