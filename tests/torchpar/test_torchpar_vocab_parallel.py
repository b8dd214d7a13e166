"""Embedding, head and loss split over the vocabulary, on four gloo ranks, in float64.

The oracle is the same module, whole, on one rank.
"""

import copy
from functools import partial

import pytest
import torch
from modules import normal, share
from ranks import RANKS, axis, on_ranks
from torch import nn
from torch.nn import functional as F

from torchpar.manual.megatron.vocab_parallel import VocabParallelEmbedding, vocab_parallel_cross_entropy
from torchpar.manual.tensor_parallel import ColumnParallelLinear

# Sums in another order than one device's: a few units in the last place, of numbers of order 1.
close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-14)


@on_ranks
def test_embedding_and_loss_over_a_vocabulary_that_does_not_divide(rank: int) -> None:
    for vocab in (10, 5, 2, 8):  # 5 and 2 leave ranks with padding alone
        ids = torch.arange(14).remainder(vocab).view(2, 7)
        targets = ids.roll(1).flatten().masked_fill(torch.arange(14) == 3, -100)
        whole = nn.Embedding(vocab, 4, dtype=torch.float64)
        with torch.no_grad():
            whole.weight.copy_(normal(vocab, 4))
        split = VocabParallelEmbedding.from_embedding(copy.deepcopy(whole), axis())
        head = ColumnParallelLinear.from_linear(as_linear(whole), axis(), padded=True)
        head.weight = split.weight
        x, x2 = whole(ids), split(ids)
        assert torch.equal(x, x2)
        for reduction in ("none", "sum", "mean"):
            whole.zero_grad()
            split.zero_grad()
            logits = whole(ids).flatten(0, 1) @ whole.weight.t()
            loss = F.cross_entropy(logits, targets, reduction=reduction)
            loss2 = vocab_parallel_cross_entropy(
                head(split(ids).flatten(0, 1)), targets, axis(), vocab_size=vocab, reduction=reduction
            )
            close(loss2, loss)
            loss.square().sum().backward()
            loss2.square().sum().backward()
            close(split.split.gather(split.weight.grad, axis()), whole.weight.grad)
            padding = split.weight.grad[max(vocab - rank * len(split.weight), 0) :]
            assert not padding.any()


def as_linear(embedding: nn.Embedding) -> nn.Linear:
    linear = nn.Linear(embedding.embedding_dim, embedding.num_embeddings, bias=False, dtype=torch.float64)
    linear.weight = embedding.weight
    return linear


@on_ranks
def test_loss_of_extreme_and_of_bfloat16_logits(rank: int) -> None:
    logits, targets = 1e4 * normal(6, 8), torch.arange(6)
    close(
        vocab_parallel_cross_entropy(share(logits, rank, 1), targets, axis()),
        F.cross_entropy(logits, targets),
    )
    leaf = share(normal(6, 8), rank, 1).bfloat16().requires_grad_()
    loss = vocab_parallel_cross_entropy(leaf, targets, axis())
    loss.backward()
    assert (loss.dtype, leaf.grad.dtype) == (torch.float32, torch.bfloat16)
    reference = torch.cat([share(normal(6, 8), r, 1).bfloat16().float() for r in range(RANKS)], 1)
    close(loss, F.cross_entropy(reference, targets), rtol=1e-6, atol=1e-6)


@on_ranks
def test_loss_of_masked_logits(rank: int) -> None:
    """Whole ranks have nothing but minus infinity."""
    logits, targets = normal(3, 8), torch.tensor([0, 1, 0])
    logits[:, 2:] = -torch.inf
    whole, mine = logits.clone().requires_grad_(), share(logits, rank, 1).clone().requires_grad_()
    expected = F.cross_entropy(whole, targets)
    loss = vocab_parallel_cross_entropy(mine, targets, axis())
    close(loss, expected)
    expected.backward()
    loss.backward()
    close(mine.grad, share(whole.grad, rank, 1))


@on_ranks
def test_ids_outside_of_the_vocabulary_are_an_error_on_every_rank(rank: int) -> None:
    """Also where the padding has rows for them, and where they count from the end."""
    split = VocabParallelEmbedding.from_embedding(nn.Embedding(7, 4), axis())
    for outside in (7, 9, -3):
        with pytest.raises(IndexError, match=rf"id {outside} is outside of the vocabulary of 7"):
            split(torch.tensor([0, outside]))


@on_ranks
def test_what_the_loss_cannot_do_is_an_error(rank: int) -> None:
    mine = normal(3, 2).requires_grad_()
    for targets in ([0, 7, 1], [0, -5, 1]):
        with pytest.raises(IndexError, match=rf"target {targets[1]} is outside of the vocabulary of 7"):
            vocab_parallel_cross_entropy(mine, torch.tensor(targets), axis(), vocab_size=7)
    loss = vocab_parallel_cross_entropy(mine, torch.arange(3), axis())
    with pytest.raises(RuntimeError, match="differentiated only once"):
        torch.autograd.grad(loss, mine, create_graph=True)
