"""The ledger: HLO text that XLA writes, by hand and for real."""

from collections.abc import Mapping

import pytest
from jax_steps import two_steps

from compare.contract.communication import Communication, summed
from compare.spec.experiment import Layout
from jaxpar.measure.hlo import collectives
from jaxpar.measure.ledger import communications

GRID = {"dp": 2, "tp": 2}
CASES = {
    "listed groups along the last axis": (
        "%x = f32[4,8]{1,0} all-reduce(%p), replica_groups={{0,1},{2,3}}, to_apply=%add",
        ("all_reduce", "tp", 1, 128, 128, "activations"),
    ),
    "iota groups, transposed, along the first axis": (
        "%x = f32[4,8]{1,0} all-reduce(%p), replica_groups=[2,2]<=[2,2]T(1,0), to_apply=%add",
        ("all_reduce", "dp", 1, 128, 128, "gradients"),
    ),
    "named mesh axes": (
        "%x = f32[4,8]{1,0} all-reduce(%p), replica_groups=mesh['dp'=2,'tp'=2] {'dp'}, to_apply=%add",
        ("all_reduce", "dp", 1, 128, 128, "gradients"),
    ),
    "named mesh axes over devices in another order": (
        "%x = f32[8]{0} all-gather(%p), replica_groups=mesh['a'=1,'b'=2,'c'=2], "
        "device_ids=([2,2]T(1,0)) {'b'}, dimensions={0}",
        ("all_gather", "tp", 1, 32, 16, "activations"),
    ),
    "named mesh axes over listed devices": (
        "%x = f32[8]{0} all-gather(%p), replica_groups=mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}",
        ("all_gather", "dp", 1, 32, 16, "parameters"),
    ),
    "a named scope says what it is for": (
        "%x = f32[4,8]{1,0} all-reduce(%p), replica_groups={{0,1},{2,3}}, to_apply=%add, "
        'metadata={op_name="jit(step)/for_gradients/psum"}',
        ("all_reduce", "tp", 1, 128, 128, "gradients"),
    ),
    "empty groups are everyone": (
        "%x = f32[4,8]{1,0} all-reduce(%p), replica_groups={}, to_apply=%add",
        ("all_reduce", "dp+tp", 1, 128, 192, "gradients"),
    ),
    "a tuple counts every operand": (
        "%x = (f32[4]{0}, bf16[8]{0}, pred[]) all-reduce(%p, %p, %p), replica_groups=[1,4]<=[4]",
        ("all_reduce", "dp+tp", 1, 33, 49, "gradients"),
    ),
    "a gather counts its result": (
        "%x = f32[8]{0} all-gather(%p), replica_groups=[2,2]<=[4], dimensions={0}",
        ("all_gather", "tp", 1, 32, 16, "activations"),
    ),
    "a scatter counts its operand": (
        "%x = f32[8]{0} reduce-scatter(%p), replica_groups=[2,2]<=[4], dimensions={0}, to_apply=%add",
        ("reduce_scatter", "tp", 1, 64, 32, "activations"),
    ),
    "pairs of a permute stay along an axis": (
        "%x = f32[8]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0},{2,3},{3,2}}",
        ("permute", "tp", 1, 32, 32, "activations"),
    ),
    "start and done are one gather": (
        "%s = (f32[4]{0}, f32[8]{0}) all-gather-start(%p), replica_groups=[2,2]<=[4], dimensions={0}\n"
        "  %x = f32[8]{0} all-gather-done(%s)",
        ("all_gather", "tp", 1, 32, 16, "activations"),
    ),
    "start and done are one permute": (
        "%s = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%p), "
        "source_target_pairs={{0,2},{1,3}}\n"
        "  %x = f32[8]{0} collective-permute-done(%s)",
        ("permute", "dp", 1, 32, 32, "gradients"),
    ),
}


def entries(hlo: str | None, sizes: Mapping[str, int]) -> list[Communication]:
    """Sums of kind, axis and purpose."""
    assert hlo
    return summed(communications(hlo, sizes))


def module(entry: str, others: str = "") -> str:
    return (
        f"HloModule m, num_partitions=4\n\n{others}\n\nENTRY %main (p: f32[8]) -> f32[8] {{\n  {entry}\n}}\n"
    )


def test_spellings():
    for name, (text, expected) in CASES.items():
        (entry,) = entries(module(text), GRID)
        kind, axis, calls, size, wire, purpose = expected
        assert entry == Communication(
            kind=kind, axis=axis, calls=calls, bytes=size, wire_bytes=wire, purpose=purpose
        ), name


def test_ranks_of_a_pipeline_send_and_run_what_is_theirs():
    permute = "%x = f32[8]{0} collective-permute(%p), source_target_pairs={{0,2},{1,3}}"
    reduce = "%y = f32[8]{0} all-reduce(%p), replica_groups=[2,2]<=[4], to_apply=%add, "
    loop = "%body (q: f32[8]) -> f32[8] {\n  " + reduce + 'metadata={op_name="runs_0_3_of_6/for_loss/x"}\n}'
    trips = 'body=%body, backend_config={"known_trip_count":{"n":"6"}}'
    text = module(f"{permute}\n  %w = f32[8]{{0}} while(%p), {trips}", loop)
    rows = communications(text, {"pp": 2, "tp": 2})
    found = [(row.kind, row.stage, row.calls, row.bytes, row.loops) for row in rows]
    assert found == [("permute", 0, 1, 32, ()), ("all_reduce", 1, 3, 96, (6,))]


def test_groups_of_one_are_no_communication_and_scalars_are_metrics():
    alone = "%x = f32[8]{0} all-reduce(%p), replica_groups={{0},{1},{2},{3}}, to_apply=%add"
    assert len(collectives(module(alone), GRID)) == 1
    assert entries(module(alone), GRID) == []
    scalar = "%x = f64[] all-reduce(%p), replica_groups=[1,4]<=[4], to_apply=%add"
    assert [entry.purpose for entry in entries(module(scalar), GRID)] == ["metrics"]


LOOP = """%cond (q: f32[8]) -> pred[] {
  %t = pred[] constant(true)
}

%body (q: f32[8]) -> f32[8] {
  %y = f32[8]{0} all-reduce(%q), replica_groups=[2,2]<=[4], to_apply=%add
}

%wrapped (q: f32[8]) -> f32[8] {
  %r = f32[4]{0} reduce-scatter(%q), replica_groups=[2,2]<=[4], dimensions={0}, to_apply=%add
}"""


def test_loops_multiply_and_wrapped_calls_count_once():
    text = (
        "%w = f32[8]{0} while(%p), condition=%cond, body=%body, "
        'backend_config={"known_trip_count":{"n":"6"},"known_init_step":{"init":"0","step":"1"}}\n'
        "  %s = ((f32[8]), f32[4], u32[]) async-start(%w), calls=%wrapped\n"
        "  %x = f32[4]{0} async-done(%s), calls=%wrapped"
    )
    counted = {entry.kind: entry.calls for entry in entries(module(text, LOOP), GRID)}
    assert counted == {"all_reduce": 6, "reduce_scatter": 1}


def test_what_cannot_be_read_is_an_error():
    text = "%w = f32[8]{0} while(%p), condition=%cond, body=%body"
    with pytest.raises(ValueError, match="trip count"):
        entries(module(text, LOOP), GRID)
    with pytest.raises(ValueError, match="replica groups"):
        entries(module("%x = f32[8]{0} all-reduce(%p), to_apply=%add"), GRID)


def test_a_merged_permute_counts_all_that_it_sends():
    """As on a GPU: two operands, two results, and context words, which are no data."""
    shapes = "((f32[8]{0}, f32[4]{0}), (f32[8]{0}, f32[4]{0}), u32[], u32[])"
    text = f"%s = {shapes} collective-permute-start(%p, %q), source_target_pairs={{{{0,1}},{{1,0}}}}"
    (entry,) = communications(module(text), GRID)
    assert (entry.bytes, entry.dtype) == (48, "f32")
    merged = "%x = (u32[2]{0}, u32[3]{0}) all-reduce(%p, %q), replica_groups=[2,2]<=[4], to_apply=%add"
    (entry,) = communications(module(merged), GRID)
    assert (entry.bytes, entry.dtype) == (20, "u32")


def test_what_may_communicate_in_other_ways_is_named():
    for text in (
        "%s = (f32[8]{0}, u32[], token[]) send(%p, %t), channel_id=1",
        '%c = f32[8]{0} custom-call(%p), custom_call_target="nvshmem_all_reduce"',
    ):
        problems: list[str] = []
        assert communications(module(text), GRID, problems=problems) == []
        assert len(problems) == 1
        assert "is an operation that the ledger does not know" in problems[0]
        problems.clear()
        on_host = f"{text}, is_host_transfer=true"
        assert communications(module(on_host), GRID, problems=problems) == problems == []


DERIVED = {
    "jit(step)/jvp(for_parameters)/all_gather": "parameters",
    "jit(step)/transpose(jvp(for_parameters))/reduce_scatter": "gradients",
    "jit(step)/transpose(jvp())/checkpoint/rematted_computation/for_parameters/all_gather": "parameters",
    "jit(step)/transpose(jvp())/checkpoint/for_activations/psum": "activation gradients",
    "jit(step)/for_replicated_gradients/for_norm/psum": "norm",
    "jit(step)/transpose(jvp())/for_tied_gradients/psum": "tied gradients",
    "jit(step)/for_good/psum": "activations",
}
OF_PIPELINES = {
    "jit(step)/jvp()/while/body/vmap()/add": "activations",
    "jit(step)/transpose(jvp())/while/body/add_any": "activation gradients",
    "jit(step)/vmap(transpose(vmap(jvp(jit(_roll_static)))))/concatenate": "activation gradients",
    "jit(step)/jvp()/transpose": "activations",
}


def test_a_purpose_that_was_said_or_that_of_its_derivative():
    """Autodiff's transpose has the scope of what it is derived from; so has a forward computed anew."""
    reduce = "%x = f64[8]{0} all-reduce(%p), replica_groups={{0,1},{2,3}}, to_apply=%add"
    permute = "%x = f32[8]{0} collective-permute(%p), source_target_pairs={{0,2},{2,0}}"
    for text, purposes in ((reduce, DERIVED), (permute, OF_PIPELINES)):
        for op_name, purpose in purposes.items():
            made = f'{text}, metadata={{op_name="{op_name}"}}'
            found = entries(module(made), {"pp": 2, "tp": 2})
            assert [entry.purpose for entry in found] == [purpose], op_name


def test_nothing_is_reduced_over_axes_of_one_device():
    """XLA on a CPU would copy what it reduces."""
    for layout in (Layout(), Layout(dp_replicate=2), Layout(dp_shard=4, zero=1), Layout(tp=2)):
        found = collectives(two_steps("jax-manual", layout).hlo, layout.axes)
        assert all(max(map(len, collective.groups)) > 1 for collective in found)
