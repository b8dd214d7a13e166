"""Where the time of torch's steps goes: operators by class."""

import pytest
from torch_operators import class_of


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("aten::mm", "linear layers"),
        ("aten::addmm", "linear layers"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("aten::gelu_backward", "elementwise"),
        ("aten::native_layer_norm", "elementwise"),
        ("aten::add_", "elementwise"),
        ("aten::_fused_adamw_", "optimizer"),
        ("aten::linalg_vector_norm", "optimizer"),
        ("Optimizer.step#AdamW.step", "optimizer"),
        ("aten::copy_", "copies"),
        ("aten::cat", "copies"),
        ("c10d::send", "communication"),
        ("gloo:all_reduce", "communication"),
        ("aten::empty", "host"),
        ("autograd::engine::evaluate_function: MmBackward0", "host"),
    ],
)
def test_an_operator_has_a_class(operator, kind):
    assert class_of(operator) == kind
