"""Logical bytes that a device sends in a step, by the papers: sizes of full (gathered) tensors.

    data parallel       all-reduce of gradients        G, or a device's shard of it under ZeRO
    fully sharded       reduce-scatter of gradients    G a step
                        all-gather of parameters       P a step; ZeRO-3: each forward and backward
    tensor parallel     all-reduce                     2 L + 1 streams a pass, forward and backward
      and sequence      reduce-scatter and all-gather  2 L + 1 streams a pass, forward and backward, each
    pipeline parallel   permute                        a stream a microbatch, forward and backward
    expert parallel     all-to-all                     2 k streams a layer, forward and backward
    context parallel    all-gather, reduce-scatter     2 n L streams: K, V forward, their gradients backward
      in a ring         permute                        2 (n - 1) L; backward as many, and 2 n L for gradients
      Ulysses           all-to-all                     4 L: q, K, V and the result; backward as many

P and G are a device's parameters and gradients before dp_shard splits them. A stream is (B, T, C) of the
device's rows and positions. tp splits the heads that cp sends; K and V may have fewer heads. Devices along cp
are replicas. Each of L layers has two regions of tp, attention and MLP; the additional one is the output of
the embedding, in backward the input of the head. `compare.spec.engines.engine` declares how engines differ.

Sources: ZeRO (arXiv 1910.02054, section 7); Megatron (1909.08053) and sequence parallelism (2205.05198,
section 4.2); 1F1B (2006.09503); context parallelism of Llama 3 (2407.21783, section 3.3.2), Ring Attention
(2310.01889), Ulysses (2309.14509); GShard (2006.16668).
"""

from collections import defaultdict
from collections.abc import Mapping
from functools import partial

from compare.contract.communication import (
    ACTIVATION_GRADIENTS,
    ACTIVATIONS,
    GRADIENTS,
    LOSS,
    PARAMETERS,
    REPLICATED_GRADIENTS,
    ROUTING,
    TIED_GRADIENTS,
)
from compare.numerics.parameters import block_parameters, end_parameters, storage_dtype
from compare.spec.axes import CP, DATA, DP_SHARD, EP, PP, REPLICAS, SHARDED_FROM, SHARDS, TP, joined_of
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment
from compare.theory.memory import (
    elements_of_stage,
    is_split_by,
    on_one_device,
    parameters_of_stage,
)

WIDE = ("float64", "float32")
Bytes = dict[tuple[str, str, str], float]
"""(kind, axis, purpose) -> logical bytes of a step."""
COUNT = 8
"""Bytes of the number of tokens of an expert."""
ROLE = {"all_reduce": "reduce", "reduce_scatter": "reduce", "all_gather": "gather", "broadcast": "gather"}
"""Kind of collective -> its role. XLA on a CPU turns a reduce-scatter into an all-reduce and a slice."""
EXCHANGE = "exchange"
"""Role of collectives of any kind that move tokens to experts and back."""
SMALL = (LOSS, TIED_GRADIENTS, REPLICATED_GRADIENTS, ROUTING)
"""Purposes of few bytes, which engines label and cut differently. Roles leave them out."""


def textbook(engine: str, experiment: Experiment, *, stage: int = 0) -> Mapping[tuple[str, str], float]:
    """(axis, role) -> bytes that a device of a stage sends in a step."""
    flows: dict[tuple[str, str], float] = defaultdict(float)
    for (kind, axis, purpose), size in bytes_sent(engine, experiment, stage=stage).items():
        if purpose not in SMALL:
            flows[axis, role_of(kind, axis, purpose)] += size
    return flows


def role_of(kind: str, axis: str, purpose: str) -> str:
    """The role of a collective."""
    is_exchange = axis == EP and purpose in (ACTIVATIONS, ACTIVATION_GRADIENTS)
    return EXCHANGE if is_exchange else ROLE.get(kind, kind)


def is_plain(experiment: Experiment) -> bool:
    """Whether there is a closed form: a pipeline under ZeRO-3 gathers parameters ahead of its tasks."""
    layout = experiment.layout
    return layout.pp == 1 or layout.zero < SHARDED_FROM["parameters"] or not layout.reshard_after_forward


def bytes_sent(engine: str, experiment: Experiment, *, stage: int = 0) -> Bytes:
    """Bytes that a device of a stage sends in a step, by kind, axis and purpose."""
    layout = experiment.layout
    sent: Bytes = {}
    if experiment.model.n_experts and (data := joined_of(DATA, layout.axes)):
        numbers = experiment.model.n_layer * experiment.model.n_experts
        sent["all_reduce", data, ROUTING] = COUNT * numbers * experiment.microbatches_per_step
    for by_ep in (False, True):
        for key, size in _data_parallel(engine, experiment, stage, by_ep=by_ep).items():
            sent[key] = sent.get(key, 0.0) + size
    if layout.ep > 1:
        sent |= _expert_parallel(engine, experiment)
    if layout.tp > 1:
        sent |= _tensor_parallel(engine, experiment, stage)
    if layout.cp > 1:
        sent |= _context_parallel(engine, experiment)
    if layout.pp > 1:
        sent |= _pipeline_parallel(experiment, stage)
    return {key: size for key, size in sent.items() if size}


def _data_parallel(engine: str, experiment: Experiment, stage: int, *, by_ep: bool) -> Bytes:
    """Gradients, and under ZeRO parameters: those that ep splits, or those that it does not split."""
    layout, able, itemsize = experiment.layout, ENGINES[engine], storage_dtype(experiment).itemsize
    elements = partial(elements_of_stage, engine, experiment, stage=stage, by_ep=by_ep)
    if not elements():
        return {}
    data = joined_of((axis for axis in DATA if not by_ep or axis != EP), layout.axes)
    shards = joined_of((DP_SHARD,) if by_ep else SHARDS, layout.axes)
    if not layout.zero:
        return {("all_reduce", data, GRADIENTS): itemsize * elements()} if data else {}
    # DDP, next to PyTorch's ZeRO-1, reduces over shards and replicas at once.
    by_ddp = layout.zero == 1 and able.sends_by == "pytorch"
    sent: Bytes = {}
    if (replicas := joined_of(REPLICAS, layout.axes)) and not by_ddp:
        sent["all_reduce", replicas, GRADIENTS] = itemsize * elements(sharded=True)
    if shards:
        # JAX and DTensor scatter the gradients of each pass, other engines their sum.
        by_pass = able.is_jax or able.sends_by == "dtensor"
        times = (
            experiment.microbatches_per_step if by_pass and layout.zero >= SHARDED_FROM["gradients"] else 1
        )
        kind, axis = ("all_reduce", data) if by_ddp else ("reduce_scatter", shards)
        sent[kind, axis, GRADIENTS] = times * itemsize * elements()
        sent["all_gather", shards, PARAMETERS] = itemsize * _gathered(engine, experiment, elements(), by_ep)
    return sent


def _gathered(engine: str, experiment: Experiment, elements: float, by_ep: bool) -> float:
    """Elements of parameters that ZeRO gathers in a step, from the elements that a stage has.

    An element in 16 bits counts by its share of the bytes of a stored one.
    """
    able = ENGINES[engine]
    layout, model, passes = experiment.layout, experiment.model, experiment.microbatches_per_step
    block = [p for p in block_parameters(model, 0) if by_ep == (layout.ep > 1 and is_split_by(EP, p))]
    stored = model.n_layer // layout.pp * on_one_device(block, layout)
    ends, layers = elements - stored, stored
    if experiment.gathers_in_16_bits and not able.is_jax:
        factors = [p for p in block if p.is_factor]
        layers -= (1 - _width_of_products(engine, experiment)) * (
            model.n_layer // layout.pp * on_one_device(factors, layout)
        )
    if layout.zero == SHARDED_FROM["parameters"] and layout.reshard_after_forward:
        times = {"step": 1, "pass": passes if layout.pp == 1 else 1, "use": 2 * passes}[able.gathers_ends]
        return times * ends + 2 * passes * layers
    splits_again = able.is_jax or able.sends_by == "pytorch"  # after each pass, even without resharding
    if splits_again and layout.zero >= able.sharded_from["parameters"] and layout.pp == 1:
        return (passes if able.gathers_ends == "pass" else 1) * ends + passes * layers
    return ends + layers


def _expert_parallel(engine: str, experiment: Experiment) -> Bytes:
    """Rows of tokens, sent to their experts and back, forward and backward; again where remat recomputes.

    With a fair router as many rows come as go. Without a ragged exchange a device sends to each device room
    for all of its tokens, once each; what comes back is a sum, which backward does not use.
    """
    layout, model, able = experiment.layout, experiment.model, ENGINES[engine]
    narrow = 1.0 if experiment.precision.dtype in WIDE else 0.5
    rows = narrow * model.n_layer * stream_bytes(experiment)
    rows *= layout.ep if able.pads_rows else model.experts_per_token
    if able.pads_rows and layout.sequence_parallel:
        rows /= layout.tp  # a device sends its own positions, and tp gathers them at the receiver
    times = 1 if able.remat_for(layout) == "none" else 2
    routed = COUNT * model.n_layer * model.n_experts * experiment.microbatches_per_step
    return {
        ("all_to_all", EP, ACTIVATIONS): (1 + times if able.pads_rows else 2 * times) * rows,
        ("all_to_all", EP, ACTIVATION_GRADIENTS): 2 * rows,
        ("all_to_all", EP, ROUTING): 0.0 if able.pads_rows else times * routed,
    }


def _tensor_parallel(engine: str, experiment: Experiment, stage: int) -> Bytes:
    """Streams into and out of the regions of tp. Backward gathers again what it recomputes.

    It does not need the last sum of a layer, unless dropout follows: PyTorch's checkpoint then recomputes it.
    JAX's `dots` keeps all sums.
    """
    layout, model, remat = experiment.layout, experiment.model, ENGINES[engine].remat_for(experiment.layout)
    pass_bytes, by_jax = stream_bytes(experiment), ENGINES[engine].is_jax
    first, last = stage == 0, stage == layout.pp - 1
    regions, narrow = 2 * model.n_layer // layout.pp, _width_of_products(engine, experiment)
    out, into = (regions * narrow + first) * pass_bytes, (regions + last) * pass_bytes
    keeps_sums = remat == "none" or (remat == "dots" and by_jax)
    share = 0.0 if keeps_sums else 1.0 if model.dropout and not by_jax else 0.5
    again = share * regions * narrow * pass_bytes
    parameters = parameters_of_stage(engine, experiment, stage=stage)
    if layout.sequence_parallel:
        regathered = regions * pass_bytes if remat != "none" else 0
        replicated = sum(p.size for p in parameters if not is_split_by(TP, p))
        sent: Bytes = {
            ("reduce_scatter", TP, ACTIVATIONS): out + again,
            ("reduce_scatter", TP, ACTIVATION_GRADIENTS): into,
            ("all_gather", TP, ACTIVATIONS): into + regathered,
            ("all_gather", TP, ACTIVATION_GRADIENTS): out,
        }
    else:
        replicated = sum(p.size for p in parameters if "choice" in p.axes)
        sent = {("all_reduce", TP, ACTIVATIONS): out + again, ("all_reduce", TP, ACTIVATION_GRADIENTS): into}
    sent["all_reduce", TP, REPLICATED_GRADIENTS] = _itemsize_of_shard(experiment) * replicated
    if last:  # of each position the largest logit, the sum of exponentials, and the target's logit
        numbers = 3 * (1 + (experiment.train.loss_chunks > 1))  # in chunks, all of it again in backward
        sent["all_gather", TP, LOSS] = layout.tp * numbers * pass_bytes / model.n_embd
    return sent


def _context_parallel(engine: str, experiment: Experiment) -> Bytes:
    """Keys and values from the other devices of cp. Backward under remat fetches them again.

    JAX's `dots` keeps those of a ring, and in a ring of two XLA merges both fetches of backward, a hop each.
    Gradients that a ring sums have the dtype of the weights.
    """
    layout, model, ranks = experiment.layout, experiment.model, experiment.layout.cp
    narrow = _width_of_products(engine, experiment)
    queries = narrow * model.n_layer / (layout.pp * layout.tp) * stream_bytes(experiment)
    keys_values = 2 * queries / model.group
    remat, by_jax = ENGINES[engine].remat_for(layout), ENGINES[engine].is_jax
    times = 1 if remat == "none" else 2
    rounds = 2 if remat == "none" or (by_jax and (remat == "dots" or ranks == 2)) else 3
    kind, forward, backward = {
        "allgather": ("all_gather", times * ranks * keys_values, ranks * keys_values),
        "ring": ("permute", rounds * (ranks - 1) * keys_values, ranks * keys_values / narrow),
        "ulysses": ("all_to_all", times * (2 * queries + keys_values), 2 * queries + keys_values),
    }[layout.context]
    transposed = "reduce_scatter" if kind == "all_gather" else kind
    return {(kind, CP, ACTIVATIONS): forward, (transposed, CP, ACTIVATION_GRADIENTS): backward}


def _pipeline_parallel(experiment: Experiment, stage: int) -> Bytes:
    layout = experiment.layout
    first, last = stage == 0, stage == layout.pp - 1
    message = stream_bytes(experiment) / (layout.tp if layout.sequence_parallel else 1)
    (token, *_), _ = end_parameters(experiment.model)
    tied = _itemsize_of_shard(experiment) * on_one_device([token], layout)
    return {
        ("permute", PP, ACTIVATIONS): (layout.chunks - last) * message,
        ("permute", PP, ACTIVATION_GRADIENTS): (layout.chunks - first) * message,
        ("permute", PP, TIED_GRADIENTS): tied * (first or last),
    }


def stream_bytes(experiment: Experiment) -> float:
    """Bytes of the activations (B, T, C) of all passes, for a device's rows and positions."""
    train, model, layout = experiment.train, experiment.model, experiment.layout
    rows = train.gradient_accumulation_steps * (train.batch_size // layout.data_parallel)
    return storage_dtype(experiment).itemsize * rows * model.block_size / layout.cp * model.n_embd


def _width_of_products(engine: str, experiment: Experiment) -> float:
    """Width of products over the width of a stream: half in 16 bits. XLA on a CPU sends no bfloat16."""
    dtype = experiment.precision.dtype
    by_jax = ENGINES[engine].is_jax
    return 1.0 if dtype in WIDE or (by_jax and dtype == "bfloat16") else 0.5


def _itemsize_of_shard(experiment: Experiment) -> float:
    """Bytes on a device for each element of a gradient, under ZeRO of its shard."""
    layout = experiment.layout
    return storage_dtype(experiment).itemsize / (layout.dp_shard if layout.zero else 1)
