"""The closed form of bucket sizes, against the buckets that torch-manual makes."""

import pytest

from compare.judge.closed_forms.buckets import bucket_sizes
from compare.spec.experiment import Model
from torchpar.manual.buckets import make_buckets
from torchpar.model import GPT


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("limit", [0.0, 5e3, 20e3, 100e3, float("inf")])
def test_buckets_are_as_large_as_the_closed_form_says(limit, bias):
    model = Model(n_layer=3, n_head=2, n_embd=16, block_size=16, bias=bias)
    made = [sum(p.nbytes for p in bucket.parameters) for bucket in make_buckets(GPT(model), limit)]
    assert bucket_sizes(model, limit=limit, itemsize=4) == made
