"""The sections of an experiment, as frozen data: each field, its default, its bounds, and what it means.

Field names are nanoGPT's where nanoGPT has the field, torchtitan's for the degrees of the layout. The
docstring below a field is its help on the command line.
"""

import math
from typing import Annotated, Literal

from msgspec import Meta, Struct

from compare.spec.axes import AXES, DP_SHARD, REPLICAS, ROWS

MAX_COUNT = 2**31 - 1  # token ids and JAX's indices have 32 bits
MAX_LAYERS = 10_000  # each block's weights are named, drawn and compared one by one
LARGEST_LOSS_SCALE = 2.0**40  # products with it stay far below the largest float32
MAX_SEED = 2**63 - 1  # TOML's largest integer; Philox would take 128 bits

Positive = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
NonNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, lt=1)]


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the spec: frozen, and strict about its keys."""


class Model(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """nanoGPT's GPT: pre-LayerNorm blocks, learned positions, the head tied to the token embedding; and parts
    of its heir nanochat in place of them."""

    n_layer: Annotated[int, Meta(ge=1, le=MAX_LAYERS)] = 4
    """Number of transformer blocks (L)."""
    n_head: Positive = 4
    """Attention heads per block (H); divides n_embd."""
    n_kv_head: Count = 0
    """Heads of keys and of values (K), each for H / K heads of queries: grouped-query attention (arXiv
    2305.13245); 0 for n_head."""
    n_embd: Positive = 128
    """Width of the residual stream (C)."""
    block_size: Positive = 128
    """Context length in tokens (T)."""
    vocab_size: Positive = 256
    """Number of token ids (V): 256 for text read as bytes, 50304 for nanoGPT's padded GPT-2 vocabulary."""
    bias: bool = False
    """Biases in the linear layers and LayerNorms, as GPT-2 has them."""
    dropout: Fraction = 0.0
    """Share of elements dropped in training, where nanoGPT drops: the same ones everywhere."""
    activation: Literal["gelu", "gelu_tanh", "relu_squared"] = "gelu"
    """gelu is the exact (erf) form, nanoGPT's; gelu_tanh is the approximation that JAX defaults to;
    relu_squared is max(x, 0)^2, nanochat's (arXiv 2109.08668)."""
    position: Literal["learned", "rope"] = "learned"
    """learned adds a vector to that of each token; rope turns queries and keys, pairs of their features, by
    angles that grow with the position (arXiv 2104.09864): there is no table of positions."""
    rope_base: Annotated[float, Meta(gt=0)] = 10000.0
    """rope: pair i of d turns by position x rope_base^(-i / d)."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """rmsnorm divides by the root mean square alone (arXiv 1910.07467): it has a scale, and never a bias."""
    norm_eps: Annotated[float, Meta(gt=0)] = 1e-5
    """Epsilon of every norm (flax defaults to 1e-6, PyTorch and nanoGPT to 1e-5)."""
    n_experts: Count = 0
    """MLPs of each block, without biases, of which a router chooses for each token (E); 0: one, for all."""
    experts_per_token: Positive = 2
    """Experts that compute each token (k): those of the largest router logits, of equal ones the first. Their
    outputs are added up with a softmax over the chosen logits as weights. No token is ever dropped."""
    balance: NonNegative = 0.01
    """What the loss has for unequal shares of the experts: this times E sum_e f_e P_e for each block, f_e the
    share of e in all choices and P_e its mean probability, over the batch of a pass (Switch Transformer)."""

    @property
    def kv_heads(self) -> int:
        """Heads of keys and of values."""
        return self.n_kv_head or self.n_head

    @property
    def group(self) -> int:
        """Heads of queries that share a head of keys and of values (G): 1 without grouped-query attention."""
        return self.n_head // self.kv_heads


class Data(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Source of the tokens."""

    source: str = "stdlib"
    """stdlib (bytes of Python's standard library), synthetic, a folder with nanoGPT's train.bin,
    one .bin file of uint16 tokens, or any other file, read as bytes."""


class Optimizer(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW or SGD, weight decay on matrices only, clipping by global norm, warm-up and cosine decay."""

    name: Literal["adamw", "sgd"] = "adamw"
    """Which optimizer: adamw, or sgd with momentum."""
    learning_rate: NonNegative = 1e-3
    """Peak learning rate."""
    decay_lr: bool = True
    """Warm up, then decay along a cosine to min_lr; false keeps learning_rate throughout."""
    warmup_iters: Count = 10
    """Steps of linear warm-up: step i uses learning_rate * (i + 1) / (warmup_iters + 1)."""
    lr_decay_iters: Positive = 200
    """Step at which the cosine reaches min_lr; if that is within the warm-up, it begins
    after it."""
    min_lr: NonNegative = 1e-4
    """Learning rate after lr_decay_iters."""
    weight_decay: NonNegative = 0.1
    """AdamW: a weight shrinks by learning_rate * weight_decay a step. SGD: added to the gradient (L2)."""
    decay: Literal["matrices", "all"] = "matrices"
    """What decays: matrices (nanoGPT: two or more dimensions), or all parameters."""
    beta1: Fraction = 0.9
    """AdamW's first-moment decay."""
    beta2: Fraction = 0.95
    """AdamW's second-moment decay."""
    eps: Annotated[float, Meta(gt=0)] = 1e-8
    """AdamW's epsilon, added after the bias-corrected square root."""
    momentum: Fraction = 0.0
    """SGD's momentum."""
    grad_clip: NonNegative = 1.0
    """Clip gradients to this global norm; 0 turns clipping off."""


class Train(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Length of the training, and size of a step."""

    max_iters: Positive = 100
    """Optimizer steps."""
    batch_size: Positive = 16
    """Sequences in one forward-backward pass, over all data-parallel devices together."""
    gradient_accumulation_steps: Positive = 1
    """Forward-backward passes added up before each optimizer step; gradients are reduced once."""
    eval_interval: Count = 0
    """Evaluate before the first step, after every so many, and after the last; 0 never does."""
    eval_iters: Positive = 200
    """Forward passes over each split, of batch_size sequences, whose mean an evaluation is; rounded up to a
    multiple of gradient_accumulation_steps."""
    loss_chunks: Positive = 1
    """Parts of the positions whose logits are computed one after the other, and again in backward: they never
    exist whole. Divides block_size."""
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] = 1337
    """Seeds the initial weights and the order of the data."""


ProductDtype = Literal["float64", "float32", "tf32", "bfloat16", "float16"]


class Precision(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The dtype of the numbers."""

    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    """Compute dtype. Weights, gradients and moments are float64 for float64, else float32; bfloat16 and
    float16 are mixed precision as in nanoGPT: matrix products in 16 bits, norms, residual and loss in
    float32. float16 has a dynamic loss scale."""
    tf32: bool = False
    """Allow TF32 matrix products on NVIDIA GPUs (JAX would by default, PyTorch would not)."""
    loss_scale: Annotated[float, Meta(gt=0, le=LARGEST_LOSS_SCALE)] = 65536.0
    """float16: what the loss is multiplied by at first. An overflow skips the update and halves it."""
    loss_scale_window: Positive = 2000
    """float16: steps without an overflow after which the scale is doubled."""
    loss_scale_hysteresis: Positive = 1
    """float16: overflows after which the scale is halved; the steps are skipped anyway."""
    min_loss_scale: Annotated[float, Meta(gt=0, le=LARGEST_LOSS_SCALE)] = 1.0
    """float16: the smallest scale; an overflow at it ends the run."""

    @property
    def product_dtype(self) -> ProductDtype:
        """How matrix products are computed: dtype, or tf32 where float32 may be."""
        return "tf32" if self.tf32 and self.dtype == "float32" else self.dtype


class Layout(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Spread of the run over devices: a point in a space of degrees, whose product is the devices."""

    dp_replicate: Positive = 1
    """Data parallelism: groups of devices that hold a replica of the model and a share of each batch."""
    dp_shard: Positive = 1
    """Data parallelism whose devices share out one replica's state: see zero."""
    zero: Literal[0, 1, 2, 3] = 0
    """What dp_shard splits (ZeRO stages): 1 optimizer state, 2 also gradients, 3 also parameters (FSDP)."""
    reshard_after_forward: bool = True
    """zero 3: free gathered parameters after forward and gather them again in backward (FULL_SHARD); false
    keeps them in between (SHARD_GRAD_OP)."""
    tp: Positive = 1
    """Tensor parallelism: attention heads, MLP and vocabulary are split (Megatron)."""
    sequence_parallel: bool = False
    """Between tensor-parallel regions, split activations along the sequence too."""
    cp: Positive = 1
    """Context parallelism: each sequence is split, and attention fetches keys and values of the others."""
    context: Literal["allgather", "ring", "ulysses"] = "allgather"
    """How attention sees all positions under cp: keys and values of all are gathered (allgather), or pass by
    one device's at a time (ring), or each device has all positions of some of the heads (ulysses)."""
    zigzag: bool = False
    """Under cp give each device an early and a late part of the sequence: a causal mask then leaves each as
    much to do."""
    ep: Positive = 1
    """Expert parallelism: the ranks of dp_shard that share out a layer's experts; it divides dp_shard."""
    pp: Positive = 1
    """Pipeline parallelism: ranks that hold a share of the blocks each."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """In which order the pipeline's ranks work on the microbatches; a run's report draws it."""
    chunks: Positive = 1
    """Stages on each rank of the pipeline; 2 or more for interleaved."""
    microbatches: Positive = 1
    """Microbatches that a pipeline cuts each pass into; those of all accumulated passes share a schedule."""
    gradient_sync: Literal["naive", "flat", "overlapped", "bucketed"] = "bucketed"
    """How the manual engines reduce gradients over dp_replicate: naive (per parameter, after backward), flat
    (one tensor, after backward), overlapped (per parameter, during backward), bucketed (during backward).
    The compiler and the library choose for themselves."""
    bucket_mb: Annotated[float, Meta(ge=0.001, le=1e6)] = 25.0
    """Size of a gradient bucket in MB (1e6 bytes) for bucketed, and for DDP; at least a kilobyte."""
    remat: Literal["auto", "none", "dots", "full"] = "auto"
    """Recompute activations in backward: none, all but matrix products (dots), or everything (full).
    auto is what is fastest in each framework: dots under XLA's scan, none in eager PyTorch."""
    offload: Literal["none", "optimizer"] = "none"
    """Keep the optimizer's moments in the host's memory: they are on the device for the update only."""
    compile: Literal["auto", "none", "aot_eager", "inductor"] = "auto"
    """How torch-compiler compiles; no other engine asks. none: DTensor plans at every operator; aot_eager:
    torch.compile traces one program, run operator by operator; inductor: and fused. auto is inductor on GPUs,
    and none on a CPU, where a compilation takes longer than a small training, with remat = full and with
    experts."""

    @property
    def axes(self) -> dict[str, int]:
        """The mesh: degree by axis name, outermost first. `dp_shard` has what ep leaves of it."""
        return {name: getattr(self, name) // (self.ep if name == DP_SHARD else 1) for name in AXES}

    @property
    def devices(self) -> int:
        """Devices in use: the product of all degrees."""
        return math.prod(self.axes.values())

    def coordinates(self, device: int) -> dict[str, int]:
        """Position of a device in the mesh, by axis; the last axis counts fastest."""
        position = {}
        for axis, degree in reversed(self.axes.items()):
            device, position[axis] = divmod(device, degree)
        return position

    @property
    def data_parallel(self) -> int:
        """Shares that a batch is cut into."""
        return math.prod(self.axes[name] for name in ROWS)

    @property
    def replicas(self) -> int:
        """Devices that ZeRO leaves a copy each: with data of their own, and gradients to be summed."""
        return math.prod(self.axes[name] for name in REPLICAS)


class Checkpoints(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the full state of the training is saved."""

    every: Count = 0
    """Save weights, moments and the place in the data after every so many steps, and after the last one; 0
    saves nothing. `shardpair resume` goes on from there, on any engine and layout."""
    keep: Positive = 2
    """How many checkpoints to keep, the newest; with train.eval_interval the best one stays, too."""


class Experiment(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One training run, described completely: two engines given this must compute the same thing."""

    model: Model = Model()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    train: Train = Train()
    precision: Precision = Precision()
    layout: Layout = Layout()
    checkpoint: Checkpoints = Checkpoints()

    @property
    def sequences_per_step(self) -> int:
        """Rows of an optimizer step, over all passes and devices."""
        return self.train.gradient_accumulation_steps * self.train.batch_size

    @property
    def microbatches_per_step(self) -> int:
        """Forwards of a layer in an optimizer step: microbatches of a pipeline, over all passes."""
        return self.train.gradient_accumulation_steps * self.layout.microbatches

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step, over all passes and devices."""
        return self.sequences_per_step * self.model.block_size
