"""Checks of field combinations. Bounds of single fields are part of their types (`compare.spec.sections`)."""

from collections.abc import Iterator

from compare.spec.attention import why_not_core
from compare.spec.sections import Experiment, Layout, Model, Precision, Train

LARGEST_FLOAT32 = 3.4028234663852886e38
BITS = 16
"""Random bits of an element for dropout: a rate is a multiple of 2^-16."""
LANES = 4
"""Elements that share one counter, whose 64 random bits they split."""
MAX_TASKS = 200_000  # of a pipeline's schedule: each is an object in a list


class ExperimentError(ValueError):
    """The experiment cannot work. The message is one line with the key or file and what to do."""


def threshold(rate: float) -> int:
    """The number below which an element's random bits drop it."""
    return round(rate * 2**BITS)


def check(experiment: Experiment) -> Experiment:
    """Return the experiment if it can work. Raises ExperimentError, with the conflicting fields."""
    model, train, layout = experiment.model, experiment.train, experiment.layout
    for objections in (
        check_model(model),
        check_precision(experiment),
        check_attention(experiment),
        check_loss_chunks(model, train, layout),
        check_experts(model, layout),
        check_layout(model, train, layout),
        check_context(model, train, layout),
        check_pipeline(model, train, layout),
    ):
        for objection in objections:
            raise ExperimentError(objection)
    if not experiment.data.source:
        raise ExperimentError("data.source is empty: give stdlib, synthetic, or a file or folder")
    return experiment


def check_model(model: Model) -> Iterator[str]:
    """Objections to heads, width and dropout."""
    if model.n_embd % model.n_head:
        heads = f"model.n_head = {model.n_head}"
        yield f"{heads} does not divide model.n_embd = {model.n_embd}: change one of them"
    if model.n_embd == 1 and model.norm == "layernorm":
        yield "model.n_embd = 1: a LayerNorm of one feature is always zero, so no gradient is left: raise it"
    if model.position == "rope" and model.n_embd // model.n_head % 2:
        yield (
            f"model.position = rope rotates pairs of features, and model.n_head = {model.n_head} leaves an "
            f"odd number of model.n_embd = {model.n_embd} to each head: change one of them"
        )
    if model.n_head % model.kv_heads:
        yield f"model.n_kv_head = {model.n_kv_head} does not divide model.n_head = {model.n_head}: change one"
    if model.dropout and not 0 < threshold(model.dropout) < 2**BITS:
        yield (
            f"model.dropout = {model.dropout} would drop nothing, or everything: it is rounded to a multiple "
            f"of 2^-{BITS}"
        )
    if model.dropout and model.n_head * model.block_size * -(-model.block_size // LANES) > 2**32:
        yield (
            f"model.dropout = {model.dropout} with model.n_head = {model.n_head} and model.block_size = "
            f"{model.block_size}: a sequence has more weights of attention than counters: lower one of them"
        )


def check_precision(experiment: Experiment) -> Iterator[str]:
    """Objections to loss scales, and to numbers that overflow in float32."""
    precision, layout = experiment.precision, experiment.layout
    unscaled = Precision(dtype=precision.dtype, tf32=precision.tf32, gather=precision.gather)
    if precision.dtype != "float16" and precision != unscaled:
        yield (
            f"precision.dtype = {precision.dtype} has no loss scale: leave loss_scale, loss_scale_window, "
            f"loss_scale_hysteresis and min_loss_scale out, or set precision.dtype to float16"
        )
    if precision.min_loss_scale > precision.loss_scale:
        yield (
            f"precision.min_loss_scale = {precision.min_loss_scale:g} is more than precision.loss_scale = "
            f"{precision.loss_scale:g}: change one of them"
        )
    if layout.compile in ("aot_eager", "inductor") and precision.dtype == "float16":
        yield (
            f"layout.compile = {layout.compile} with precision.dtype = float16: the loss scale is a constant "
            "of the compiled program, which would be traced again at each change: set layout.compile = none"
        )
    for section in ("model", "optimizer") if precision.dtype != "float64" else ():
        fields = getattr(experiment, section)
        for key in fields.__struct_fields__:
            value = getattr(fields, key)
            if isinstance(value, float) and value > LARGEST_FLOAT32:
                yield f"{section}.{key} = {value} is infinite in float32: the most is {LARGEST_FLOAT32:.4g}"


def check_attention(experiment: Experiment) -> Iterator[str]:
    """Objections to an attention core."""
    if why := why_not_core(experiment.model.attention, experiment):
        yield why


def check_loss_chunks(model: Model, train: Train, layout: Layout) -> Iterator[str]:
    """Objections to logits in chunks."""
    chunks = f"train.loss_chunks = {train.loss_chunks}"
    if model.block_size % train.loss_chunks:
        yield f"{chunks} does not divide model.block_size = {model.block_size}: change one"
    if train.loss_chunks == 1:
        return
    if layout.pp > 1:
        yield (
            f"{chunks} with layout.pp = {layout.pp}: a pipeline has the logits of one microbatch at a time: "
            f"raise layout.microbatches instead"
        )
    if layout.sequence_parallel:
        yield (
            f"{chunks} with layout.sequence_parallel = true: each device has its own positions, and every "
            f"chunk would be gathered from all devices: leave one of them out"
        )
    if layout.cp > 1:
        yield (
            f"{chunks} with layout.cp = {layout.cp}: each device has logits of its own positions only: raise "
            "layout.cp instead"
        )


def check_experts(model: Model, layout: Layout) -> Iterator[str]:
    """Objections to experts and expert parallelism."""
    experts = model.n_experts
    if layout.dp_shard % layout.ep:
        yield (
            f"layout.ep = {layout.ep} does not divide layout.dp_shard = {layout.dp_shard}, whose ranks split "
            "the experts: change one of them"
        )
    if not experts:
        if layout.ep > 1:
            yield (
                f"layout.ep = {layout.ep} with model.n_experts = 0: the model has no experts: set "
                "model.n_experts, or take the experiment experts"
            )
        return
    if layout.compile not in ("auto", "none"):
        yield (
            f"layout.compile = {layout.compile} with model.n_experts = {experts}: the number of an expert's "
            "tokens depends on the data, and a traced program has fixed sizes: set layout.compile = none"
        )
    if experts % layout.ep:
        yield f"layout.ep = {layout.ep} does not divide model.n_experts = {experts}: change one of them"
    if (chosen := model.experts_per_token) > experts:
        yield f"model.experts_per_token = {chosen} is more than model.n_experts = {experts}: change one"
    if layout.pp > 1:
        yield (
            f"layout.pp = {layout.pp} with model.n_experts = {experts}: the load-balance loss is of a whole "
            "batch, and a pipeline has one microbatch at a time: leave one of them out"
        )


def check_layout(model: Model, train: Train, layout: Layout) -> Iterator[str]:
    """Objections to data parallelism, ZeRO and tensor parallelism."""
    if train.batch_size % layout.data_parallel:
        degrees = {key: getattr(layout, key) for key in ("dp_replicate", "dp_shard")}
        shares = " x ".join(f"layout.{key} = {degree}" for key, degree in degrees.items() if degree > 1)
        yield f"train.batch_size = {train.batch_size} is not divisible by {shares}: change one of them"
    if layout.zero and layout.dp_shard == 1:
        yield (
            f"layout.zero = {layout.zero} with layout.dp_shard = 1: there is nothing to split: set "
            f"layout.dp_shard to 2 or more, or layout.zero to 0"
        )
    if layout.dp_shard > 1 and not layout.zero and layout.ep == 1:
        yield (
            f"layout.dp_shard = {layout.dp_shard} with layout.zero = 0: choose what is split: layout.zero = "
            f"1 (optimizer state), 2 (and gradients) or 3 (and parameters)"
        )
    if not layout.reshard_after_forward and layout.zero != 3:
        yield (
            f"layout.reshard_after_forward = false with layout.zero = {layout.zero}: only zero = 3 gathers "
            f"parameters: set layout.zero to 3"
        )
    if model.n_head % layout.tp:
        yield f"layout.tp = {layout.tp} does not divide model.n_head = {model.n_head}: change one of them"
    elif model.kv_heads % layout.tp:
        yield f"layout.tp = {layout.tp} does not divide model.n_kv_head = {model.n_kv_head}: change one"
    if model.vocab_size <= (layout.tp - 1) * -(-model.vocab_size // layout.tp):
        yield (
            f"layout.tp = {layout.tp} leaves a rank without any of model.vocab_size = {model.vocab_size}: "
            f"lower layout.tp"
        )
    if layout.sequence_parallel and layout.tp == 1:
        yield "layout.sequence_parallel = true with layout.tp = 1: it splits over tp: raise layout.tp"
    if layout.sequence_parallel and model.block_size % layout.tp:
        yield (
            f"layout.sequence_parallel = true: layout.tp = {layout.tp} does not divide model.block_size = "
            f"{model.block_size}: change one of them"
        )


def check_context(model: Model, train: Train, layout: Layout) -> Iterator[str]:
    """Objections to context parallelism."""
    cp, tp = layout.cp, layout.tp
    if layout.zigzag and cp == 1:
        yield "layout.zigzag = true with layout.cp = 1: there is nothing to balance: raise layout.cp"
    if layout.zigzag and layout.context == "ulysses":
        yield (
            "layout.zigzag = true with layout.context = ulysses: each device attends to whole sequences, "
            "which is balanced: leave layout.zigzag out"
        )
    parts = cp * (2 if layout.zigzag else 1) * (tp if layout.sequence_parallel else 1)
    if cp > 1 and model.block_size % parts:
        factors = (f"layout.cp = {cp}", "2 of layout.zigzag" * layout.zigzag)
        factors += (f"layout.tp = {tp} of layout.sequence_parallel" * layout.sequence_parallel,)
        yield (
            f"{' x '.join(filter(None, factors))} does not divide model.block_size = {model.block_size}: "
            "change one of them"
        )
    if cp > 1 and layout.context == "ulysses" and (heads := model.kv_heads // tp) % cp:
        of_keys = " of keys and values" * (model.kv_heads < model.n_head)
        yield (
            f"layout.context = ulysses: layout.cp = {cp} does not divide {heads} heads{of_keys} "
            f"(model.n_head = {model.n_head}, layout.tp = {tp}): use ring or allgather"
        )
    if cp > 1 and layout.context == "ring" and model.dropout:
        yield (
            f"model.dropout = {model.dropout} with layout.context = ring: dropout is of whole rows of "
            "attention's weights, and a ring has parts of them: use allgather or ulysses"
        )


def check_pipeline(model: Model, train: Train, layout: Layout) -> Iterator[str]:
    """Objections to schedules, stages and microbatches."""
    if layout.pp == 1:
        for key in ("chunks", "microbatches"):
            if getattr(layout, key) > 1:
                yield (
                    f"layout.{key} = {getattr(layout, key)} with layout.pp = 1: this needs a pipeline: raise "
                    f"layout.pp, or accumulate with train.gradient_accumulation_steps"
                )
        return
    if (layout.chunks > 1) != (layout.schedule == "interleaved"):
        yield (
            f"layout.schedule = {layout.schedule} with layout.chunks = {layout.chunks}: interleaved has 2 or "
            f"more chunks, every other schedule 1"
        )
    if model.n_layer % (layout.pp * layout.chunks):
        yield (
            f"layout.pp = {layout.pp} x layout.chunks = {layout.chunks} stages do not divide model.n_layer = "
            f"{model.n_layer}: change one of them"
        )
    share = train.batch_size // layout.data_parallel
    if share % layout.microbatches:
        yield (
            f"layout.microbatches = {layout.microbatches} does not divide the {share} sequences of a "
            f"data-parallel share: change it or train.batch_size"
        )
    in_schedule = layout.microbatches * train.gradient_accumulation_steps
    tasks = 2 * layout.pp * layout.chunks * in_schedule
    if tasks > MAX_TASKS:
        yield (
            f"{layout.pp} ranks with {layout.chunks} stages each and {in_schedule} microbatches make a "
            f"schedule of {tasks:,} tasks; the most is {MAX_TASKS:,}: lower one of them"
        )
    if layout.schedule != "gpipe" and in_schedule < layout.pp:
        yield (
            f"layout.schedule = {layout.schedule} has {in_schedule} microbatches for layout.pp = {layout.pp} "
            f"stages: raise layout.microbatches, or use gpipe"
        )
    if layout.schedule == "interleaved" and in_schedule % layout.pp:
        yield (
            f"layout.schedule = interleaved has {in_schedule} microbatches, which layout.pp = {layout.pp} "
            f"does not divide: change layout.microbatches"
        )
