"""The sections of an experiment: fields with defaults and bounds.

Field names are nanoGPT's where nanoGPT has the field, and torchtitan's for the degrees of the layout. The
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
    """A table of an experiment. Unknown keys are errors."""


class Model(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """nanoGPT's GPT: pre-LayerNorm blocks, learned positions, the head tied to the token embedding; or parts
    of its successor nanochat."""

    n_layer: Annotated[int, Meta(ge=1, le=MAX_LAYERS)] = 4
    """Number of transformer blocks (L)."""
    n_head: Positive = 4
    """Attention heads per block (H); divides n_embd."""
    n_kv_head: Count = 0
    """Heads of keys and values (K), each for H / K heads of queries: grouped-query attention (arXiv
    2305.13245). 0: n_head."""
    n_embd: Positive = 128
    """Width of the residual stream (C)."""
    block_size: Positive = 128
    """Context length in tokens (T)."""
    vocab_size: Positive = 256
    """Number of token ids (V): 256 for text read as bytes, 50304 for nanoGPT's padded GPT-2 vocabulary."""
    bias: bool = False
    """Whether linear layers and LayerNorms have biases, as in GPT-2."""
    dropout: Fraction = 0.0
    """Share of elements dropped in training, at nanoGPT's places. All engines drop the same elements."""
    attention: Literal["auto", "dense", "blockwise", "fused"] = "auto"
    """Attention core. dense: all weights (T, T) are in memory. blockwise: the weights of one block at a time;
    in PyTorch a fused kernel. fused: a kernel for 16 bits on a GPU, in JAX cuDNN's. auto: in JAX fused where
    it can, else blockwise from 512 positions on, and dense with dropout; in PyTorch the kernel that it
    chooses."""
    activation: Literal["gelu", "gelu_tanh", "relu_squared"] = "gelu"
    """gelu: the exact form (erf), as in nanoGPT. gelu_tanh: JAX's default approximation. relu_squared:
    max(x, 0)^2, as in nanochat (arXiv 2109.08668)."""
    position: Literal["learned", "rope"] = "learned"
    """learned: add a vector for the position to each token's. rope: rotate pairs of features of queries and
    keys by angles that grow with the position (arXiv 2104.09864), without a table of positions."""
    rope_base: Annotated[float, Meta(gt=0)] = 10000.0
    """Base of rope's angles: pair i of d rotates by position x rope_base^(-i / d)."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Norm of the blocks. rmsnorm divides by the root mean square (arXiv 1910.07467) and has no bias."""
    norm_eps: Annotated[float, Meta(gt=0)] = 1e-5
    """Epsilon of every norm (flax defaults to 1e-6, PyTorch and nanoGPT to 1e-5)."""
    n_experts: Count = 0
    """MLPs of each block, without biases, of which a router chooses some for each token (E). 0: one MLP for
    all tokens."""
    experts_per_token: Positive = 2
    """Experts that compute each token (k): those with the largest router logits, the first if equal. The
    weights of their outputs are a softmax over the chosen logits. No token is dropped."""
    balance: NonNegative = 0.01
    """Weight of the load-balance loss of each block (Switch Transformer); 0 for none. The loss is E sum_e f_e
    P_e over a pass: f_e is the share of expert e in all choices, P_e its mean probability."""

    @property
    def kv_heads(self) -> int:
        """Number of heads of keys and values (K)."""
        return self.n_kv_head or self.n_head

    @property
    def group(self) -> int:
        """Heads of queries for each head of keys and values (G): 1 without grouped-query attention."""
        return self.n_head // self.kv_heads


class Data(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Source of the tokens."""

    source: str = "stdlib"
    """Source of the tokens: stdlib (bytes of Python's standard library), synthetic, a folder with nanoGPT's
    train.bin, a .bin file of tokens (nanoGPT's, of 32 bits, or a shard of llm.c), or another file, read as
    bytes."""


class Optimizer(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW or SGD, weight decay on matrices only, clipping by global norm, warm-up and cosine decay."""

    name: Literal["adamw", "sgd"] = "adamw"
    """Optimizer: adamw, or sgd with momentum."""
    learning_rate: NonNegative = 1e-3
    """Peak learning rate."""
    decay_lr: bool = True
    """Warm up, then decay along a cosine to min_lr. false: always learning_rate."""
    warmup_iters: Count = 10
    """Steps of linear warm-up: step i uses learning_rate * (i + 1) / (warmup_iters + 1)."""
    lr_decay_iters: Positive = 200
    """Step at which the cosine reaches min_lr. If it is within the warm-up, min_lr follows the warm-up."""
    min_lr: NonNegative = 1e-4
    """Learning rate after lr_decay_iters."""
    weight_decay: NonNegative = 0.1
    """AdamW: a weight shrinks by learning_rate * weight_decay in each step. SGD: added to the gradient
    (L2)."""
    decay: Literal["matrices", "all"] = "matrices"
    """Parameters that decay: matrices (two or more dimensions, as in nanoGPT), or all."""
    beta1: Fraction = 0.9
    """Decay of AdamW's first moment."""
    beta2: Fraction = 0.95
    """Decay of AdamW's second moment."""
    eps: Annotated[float, Meta(gt=0)] = 1e-8
    """AdamW's epsilon, added after the bias-corrected square root."""
    momentum: Fraction = 0.0
    """Momentum of SGD."""
    grad_clip: NonNegative = 1.0
    """Global norm to which gradients are clipped. 0: no clipping."""


class Train(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Length of the training and size of a step."""

    max_iters: Positive = 100
    """Optimizer steps."""
    batch_size: Positive = 16
    """Sequences in one forward-backward pass, over all data-parallel devices together."""
    gradient_accumulation_steps: Positive = 1
    """Forward-backward passes whose gradients are added before each optimizer step."""
    eval_interval: Count = 0
    """Steps between two evaluations; also before the first step and after the last. 0: no evaluation."""
    eval_iters: Positive = 200
    """Forward passes of batch_size sequences over which an evaluation averages, for each split; rounded up to
    a multiple of gradient_accumulation_steps."""
    loss_chunks: Positive = 1
    """Chunks of the positions whose logits are computed in sequence, and again in backward, to save
    memory. Divides block_size."""
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] = 1337
    """Seed of the initial weights and of the order of the data."""
    init_std: Annotated[float, Meta(gt=0, le=1)] = 0.02
    """Standard deviation of the initial matrices; of those that end a branch, divided by sqrt(2 n_layer)."""


ProductDtype = Literal["float64", "float32", "tf32", "bfloat16", "float16"]


class Precision(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dtypes and loss scaling."""

    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    """Compute dtype. Weights, gradients and moments are float64 for float64, else float32. bfloat16 and
    float16 are mixed precision as in nanoGPT: matrix products in 16 bits; norms, residual and loss in
    float32. float16 has a dynamic loss scale."""
    tf32: bool = False
    """Allow TF32 matrix products on NVIDIA GPUs, as JAX does by default and PyTorch does not."""
    gather: Literal["storage", "products"] = "storage"
    """Dtype in which the PyTorch engines gather weights under zero = 3. storage: as stored. products: in the
    16 bits of the products, if only products read the weight; no number changes. XLA chooses by itself."""
    loss_scale: Annotated[float, Meta(gt=0, le=LARGEST_LOSS_SCALE)] = 65536.0
    """float16: initial loss scale. An overflow skips the update and halves the scale."""
    loss_scale_window: Positive = 2000
    """float16: steps without an overflow after which the scale doubles."""
    loss_scale_hysteresis: Positive = 1
    """float16: overflows after which the scale is halved. Each of them skips its update."""
    min_loss_scale: Annotated[float, Meta(gt=0, le=LARGEST_LOSS_SCALE)] = 1.0
    """float16: smallest scale. An overflow at it ends the run."""

    @property
    def product_dtype(self) -> ProductDtype:
        """Dtype of matrix products: dtype, or tf32."""
        return "tf32" if self.tf32 and self.dtype == "float32" else self.dtype


class Layout(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layout over devices. The product of its degrees is the number of devices."""

    dp_replicate: Positive = 1
    """Data parallelism: groups of devices that each hold a replica of the model and a share of each batch."""
    dp_shard: Positive = 1
    """Data parallelism whose devices split one replica's state: see zero."""
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO stage, the state that dp_shard splits: 1 optimizer state, 2 also gradients, 3 also parameters
    (FSDP)."""
    reshard_after_forward: bool = True
    """zero 3: free gathered parameters after forward and gather them again in backward (FULL_SHARD). false:
    keep them in between (SHARD_GRAD_OP)."""
    tp: Positive = 1
    """Tensor parallelism: split attention heads, MLP and vocabulary (Megatron)."""
    sequence_parallel: bool = False
    """Also split activations along the sequence between tensor-parallel regions."""
    cp: Positive = 1
    """Context parallelism: split each sequence; attention fetches keys and values of other devices."""
    context: Literal["allgather", "ring", "ulysses"] = "allgather"
    """Attention under cp. allgather: gather all keys and values. ring: pass them on, one device's at a time.
    ulysses: exchange positions for heads, so that each device has all positions of some heads."""
    zigzag: bool = False
    """Under cp give each device an early and a late part of the sequence, to balance the causal mask."""
    ep: Positive = 1
    """Expert parallelism: ranks of dp_shard that split the experts of a layer. Divides dp_shard."""
    pp: Positive = 1
    """Pipeline parallelism: ranks that each hold a share of the blocks."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """Pipeline schedule. The report of a run draws it."""
    chunks: Positive = 1
    """Stages on each rank of the pipeline: 2 or more for interleaved, else 1."""
    microbatches: Positive = 1
    """Microbatches of each accumulated pass of a pipeline. All passes of a step share a schedule."""
    gradient_sync: Literal["naive", "flat", "overlapped", "bucketed"] = "bucketed"
    """Reduction of gradients over dp_replicate in the manual engines. naive: per parameter, after backward.
    flat: one tensor, after backward. overlapped: per parameter, during backward. bucketed: in buckets, during
    backward. Other engines choose themselves."""
    bucket_mb: Annotated[float, Meta(ge=0.001, le=1e6)] = 25.0
    """Size of a bucket in MB (1e6 bytes): of gradients, for bucketed and for DDP; of messages in a program of
    inductor, for torch-compiler."""
    remat: Literal["auto", "none", "dots", "full"] = "auto"
    """Activations that backward recomputes: none, all except matrix products (dots), or all (full). auto:
    dots in JAX engines, none in PyTorch engines, the fastest in each."""
    offload: Literal["none", "optimizer"] = "none"
    """State kept in the host's memory: the optimizer's moments, which are on the device for the update
    only."""
    compile: Literal["auto", "none", "block", "aot_eager", "inductor"] = "auto"
    """Compilation of the PyTorch engines. block: torch-manual and torch-library compile each block by itself,
    with inductor. aot_eager: torch-compiler and nanogpt-loop trace the model as one program, which runs
    operator by operator. inductor: its kernels are also fused. auto: none, but inductor for torch-compiler on
    GPUs, without remat = full and experts."""
    xla: Literal["plain", "tuned"] = "plain"
    """Options of XLA on GPUs. plain: XLA's defaults. tuned: MaxText's: latency hiding, pipelined collectives,
    double buffers, and larger messages. `--dry_run` prints them."""

    @property
    def axes(self) -> dict[str, int]:
        """The mesh: degree by axis name, outermost first. `dp_shard` is divided by ep."""
        return {name: getattr(self, name) // (self.ep if name == DP_SHARD else 1) for name in AXES}

    @property
    def devices(self) -> int:
        """Number of devices: the product of all degrees."""
        return math.prod(self.axes.values())

    def coordinates(self, device: int) -> dict[str, int]:
        """Position of a device in the mesh, by axis; the last axis varies fastest."""
        position = {}
        for axis, degree in reversed(self.axes.items()):
            device, position[axis] = divmod(device, degree)
        return position

    @property
    def data_parallel(self) -> int:
        """Number of shares of a batch."""
        axes = self.axes
        return math.prod(axes[name] for name in ROWS)

    @property
    def replicas(self) -> int:
        """Number of copies of a ZeRO shard, whose gradients are summed."""
        axes = self.axes
        return math.prod(axes[name] for name in REPLICAS)


class Checkpoints(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Saving of the training's state."""

    every: Count = 0
    """Steps between two checkpoints (weights, moments and position in the data); also after the last step. 0:
    none. `shardpair resume` continues from them, on any engine and layout."""
    keep: Positive = 2
    """Number of newest checkpoints to keep. With train.eval_interval the best one is kept, too."""


class Experiment(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A complete description of a training: two engines with the same experiment compute the same numbers."""

    model: Model = Model()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    train: Train = Train()
    precision: Precision = Precision()
    layout: Layout = Layout()
    checkpoint: Checkpoints = Checkpoints()

    @property
    def gathers_in_16_bits(self) -> bool:
        """Whether the PyTorch engines gather weights in the 16 bits of the products: `precision.gather`."""
        has_16_bits = self.precision.dtype in ("bfloat16", "float16")
        return has_16_bits and self.precision.gather == "products" and self.layout.zero == 3

    @property
    def sequences_per_step(self) -> int:
        """Sequences of an optimizer step, over all passes and devices."""
        return self.train.gradient_accumulation_steps * self.train.batch_size

    @property
    def microbatches_per_step(self) -> int:
        """Forward passes of a layer in an optimizer step: microbatches of all accumulated passes."""
        return self.train.gradient_accumulation_steps * self.layout.microbatches

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step, over all passes and devices."""
        return self.sequences_per_step * self.model.block_size
