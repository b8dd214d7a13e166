"""Floating-point operations of training on a token, in closed form: what a step's time is held against.

    weights of the blocks    6 N          a product and a sum for each weight forward, twice that backward
    head                     6 V h        the tied embedding, as the matrix that makes logits
    attention                12 L s h     scores and their sum over values: 4 s h forward, 8 s h backward

N counts all parameters but the two embedding tables, whose rows are looked up; V vocabulary, h width, L
layers, s tokens of context. The half of the scores that a causal mask hides is counted, as is the custom, and
what is computed anew in backward is not: the model needs it once.

Source: PaLM (arXiv 2204.02311, appendix B); Megatron counts alike (arXiv 2104.04473, section 5.1).
"""

from compare.numerics.parameters import end_parameters, parameter_count
from compare.spec.experiment import Experiment


def model_flops_per_token(experiment: Experiment) -> float:
    """Floating-point operations that one token of the batch takes, forward and backward.

    nanoGPT's `estimate_mfu` gives the same number by another way: it leaves the token table in N, because the
    head is tied to it, and so has no term for the head. Norms and biases are in N in both, as if they were
    products: 1 part in 7,000 of GPT-2 124M.

    Args:
        experiment: its model; neither layout nor precision changes the count.
    """
    model = experiment.model
    (token, position), _ = end_parameters(model)
    weights = parameter_count(model) - token.size - position.size
    head = model.vocab_size * model.n_embd
    attention = 2 * model.n_layer * model.block_size * model.n_embd
    return 6.0 * (weights + head + attention)
