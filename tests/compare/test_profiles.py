"""Where the time of JAX's steps goes: operations by class, from a compiled module's text."""

from jax_operations import classes_of
from profiles import CASES, SIZES

from compare.spec.engines.registry import STUDIED
from compare.studies.presets import PRESETS

HLO = """
%moves (p: f32[4,8]) -> f32[8] {
  %p = f32[4,8]{1,0} parameter(0)
  %one = f32[1,8]{1,0} dynamic-slice(%p), dynamic_slice_sizes={1,8}
  ROOT %flat = f32[8]{0} bitcast(%one)
}

%product (p.1: f32[8,8]) -> f32[8,8] {
  %p.1 = f32[8,8]{1,0} parameter(0)
  ROOT %dot.1 = f32[8,8]{1,0} dot(%p.1, %p.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (a: f32[4,8]) -> f32[8] {
  %a = f32[4,8]{1,0} parameter(0)
  %slice_fusion = f32[8]{0} fusion(%a), kind=kLoop, calls=%moves
  %dot_fusion = f32[8,8]{1,0} fusion(%a), kind=kCustom, calls=%product
  %dot.2 = f32[2,8,8]{2,1,0} dot(%a, %a), lhs_batch_dims={0}, rhs_batch_dims={0}
  %gelu = f32[8]{0} multiply(%a, %a), metadata={op_name="jit(step)/jvp(model)/mul"}
  %update = f32[8]{0} multiply(%a, %a), metadata={op_name="jit(step)/update/mul"}
  %sent = f32[8]{0} collective-permute(%a), source_target_pairs={{0,1}}
  %summed = f32[8]{0} all-reduce(%a), to_apply=%moves
  %loop = (f32[8]{0}) while(%a), condition=%moves, body=%moves
  %chosen = (f32[8]{0}) conditional(%a), branch_computations={%moves, %moves}
}
"""


def test_an_operation_has_a_class():
    found = classes_of(HLO)
    assert {name: found[name] for name in ("slice_fusion", "gelu", "update", "sent", "summed")} == {
        "slice_fusion": "copies",
        "gelu": "elementwise",
        "update": "optimizer",
        "sent": "collectives",
        "summed": "collectives",
    }


def test_products_of_batches_are_attention():
    found = classes_of(HLO)
    assert (found["dot_fusion"], found["dot.2"]) == ("linear layers", "attention")


def test_what_runs_in_control_flow_counts_once():
    assert not {"loop", "chosen"} & set(classes_of(HLO))


def test_every_case_is_an_engine_a_preset_and_a_size():
    for case in CASES:
        assert case.engine in STUDIED
        assert case.preset in PRESETS
        assert case.layers in SIZES
        assert case.experiment.layout.devices == case.devices
