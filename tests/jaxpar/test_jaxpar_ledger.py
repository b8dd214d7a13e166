"""The ledger of HLO texts, written for the test or by XLA."""

from collections.abc import Mapping

import pytest

from compare.contract.communication import Communication, summed
from jaxpar.measure.hlo_collectives import collectives
from jaxpar.measure.ledger import read_ledger

GRID = {"dp": 2, "tp": 2}
GROUPS = {  # of an all-reduce
    "{{0,1},{2,3}}": "tp",
    "[2,2]<=[2,2]T(1,0)": "dp",
    "mesh['dp'=2,'tp'=2] {'dp'}": "dp",
    "mesh['a'=1,'b'=2,'c'=2], device_ids=([2,2]T(1,0)) {'b'}": "tp",
    "mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}": "dp",
    "{}": "dp+tp",
}
PAIRS = "source_target_pairs="
SIZES = {  # kind, axis, bytes, bytes on the wire, dtypes
    "%x = (f32[4]{0}, bf16[8]{0}, pred[]) all-reduce(%p, %p, %p), replica_groups=[1,4]<=[4]": (
        ("all_reduce", "dp+tp", 33, 49, "f32, bf16, pred")
    ),
    "%x = f32[8]{0} all-gather(%p), replica_groups=[2,2]<=[4], dimensions={0}": (
        ("all_gather", "tp", 32, 16, "f32")
    ),
    "%x = f32[8]{0} reduce-scatter(%p), replica_groups=[2,2]<=[4], dimensions={0}, to_apply=%add": (
        ("reduce_scatter", "tp", 64, 32, "f32")
    ),
    f"%x = f32[8]{{0}} collective-permute(%p), {PAIRS}{{{{0,1}},{{1,0}},{{2,3}},{{3,2}}}}": (
        ("permute", "tp", 32, 32, "f32")
    ),
    "%s = (f32[4]{0}, f32[8]{0}) all-gather-start(%p), replica_groups=[2,2]<=[4], dimensions={0}\n"
    "  %x = f32[8]{0} all-gather-done(%s)": ("all_gather", "tp", 32, 16, "f32"),
    f"%s = (f32[8], f32[8], u32[], u32[]) collective-permute-start(%p), {PAIRS}{{{{0,2}},{{1,3}}}}\n"
    "  %x = f32[8]{0} collective-permute-done(%s)": ("permute", "dp", 32, 32, "f32"),
    # As on a GPU: two operands, two results, and context words, which carry no data.
    "%s = ((f32[8]{0}, f32[4]{0}), (f32[8]{0}, f32[4]{0}), u32[], u32[]) collective-permute-start(%p, %q), "
    f"{PAIRS}{{{{0,1}},{{1,0}}}}": ("permute", "tp", 48, 48, "f32"),
    "%x = (u32[2]{0}, u32[3]{0}) all-reduce(%p, %q), replica_groups=[2,2]<=[4], to_apply=%add": (
        ("all_reduce", "tp", 20, 20, "u32")
    ),
}


def entries(hlo: str | None, sizes: Mapping[str, int]) -> list[Communication]:
    """Sums of kind, axis and purpose."""
    assert hlo
    return summed(read_ledger(hlo, sizes).rows)


def module(entry: str, others: str = "") -> str:
    return (
        f"HloModule m, num_partitions=4\n\n{others}\n\nENTRY %main (p: f32[8]) -> f32[8] {{\n  {entry}\n}}\n"
    )


@pytest.mark.parametrize("groups", GROUPS)
def test_spelling_of_groups_is_read(groups):
    text = f"%x = f32[4,8]{{1,0}} all-reduce(%p), replica_groups={groups}, to_apply=%add"
    (entry,) = entries(module(text), GRID)
    assert (entry.kind, entry.axis, entry.calls, entry.bytes) == ("all_reduce", GROUPS[groups], 1, 128)


@pytest.mark.parametrize("text", SIZES, ids=[f"{row[0]}-{row[2]}" for row in SIZES.values()])
def test_size_of_a_collective(text):
    (row,) = read_ledger(module(text), GRID).rows
    assert (row.kind, row.axis, row.bytes, row.wire_bytes, row.dtype) == SIZES[text]
    assert row.calls == 1


def test_pipeline_ranks_have_their_own_rows():
    permute = "%x = f32[8]{0} collective-permute(%p), source_target_pairs={{0,2},{1,3}}"
    reduce = "%y = f32[8]{0} all-reduce(%p), replica_groups=[2,2]<=[4], to_apply=%add, "
    loop = "%body (q: f32[8]) -> f32[8] {\n  " + reduce + 'metadata={op_name="runs_0_3_of_6/for_loss/x"}\n}'
    trips = 'body=%body, backend_config={"known_trip_count":{"n":"6"}}'
    text = module(f"{permute}\n  %w = f32[8]{{0}} while(%p), {trips}", loop)
    rows = read_ledger(text, {"pp": 2, "tp": 2}).rows
    found = [(row.kind, row.stage, row.calls, row.bytes, row.loops) for row in rows]
    assert found == [("permute", 0, 1, 32, ()), ("all_reduce", 1, 3, 96, (6,))]


def test_collective_of_one_device_has_no_row():
    alone = "%x = f32[8]{0} all-reduce(%p), replica_groups={{0},{1},{2},{3}}, to_apply=%add"
    assert len(collectives(module(alone), GRID)) == 1
    assert entries(module(alone), GRID) == []


INFERRED = {
    "metrics": "f64[] all-reduce(%p), replica_groups=[1,4]<=[4]",
    "activations": "f64[8] all-reduce(%p), replica_groups=[2,2]<=[4]",  # along tp
    "gradients": "f64[8] all-reduce(%p), replica_groups=[2,2]<=[2,2]T(1,0)",
    "parameters": "f64[8] all-gather(%p), replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}",
}


@pytest.mark.parametrize("purpose", INFERRED)
def test_purpose_is_inferred(purpose):
    assert [entry.purpose for entry in entries(module(f"%x = {INFERRED[purpose]}"), GRID)] == [purpose]


LOOP = """%cond (q: f32[8]) -> pred[] {
  %t = pred[] constant(true)
}

%body (q: f32[8]) -> f32[8] {
  %y = f32[8]{0} all-reduce(%q), replica_groups=[2,2]<=[4], to_apply=%add
}

%wrapped (q: f32[8]) -> f32[8] {
  %r = f32[4]{0} reduce-scatter(%q), replica_groups=[2,2]<=[4], dimensions={0}, to_apply=%add
}"""


def test_loops_multiply_calls():
    text = (
        "%w = f32[8]{0} while(%p), condition=%cond, body=%body, "
        'backend_config={"known_trip_count":{"n":"6"},"known_init_step":{"init":"0","step":"1"}}\n'
        "  %s = ((f32[8]), f32[4], u32[]) async-start(%w), calls=%wrapped\n"
        "  %x = f32[4]{0} async-done(%s), calls=%wrapped"
    )
    counted = {entry.kind: entry.calls for entry in entries(module(text, LOOP), GRID)}
    assert counted == {"all_reduce": 6, "reduce_scatter": 1}


UNKNOWN = "is an operation that the ledger does not know"
UNREADABLE = {
    "loop": ("%w = f32[8]{0} while(%p), condition=%cond, body=%body", "no known trip count"),
    "groups": ("%x = f32[8]{0} all-reduce(%p), to_apply=%add", "whose replica groups cannot be read"),
    "send": ("%s = (f32[8]{0}, u32[], token[]) send(%p, %t), channel_id=1", UNKNOWN),
    "custom": ('%c = f32[8]{0} custom-call(%p), custom_call_target="nvshmem_all_reduce"', UNKNOWN),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_instruction_is_named(name):
    text, words = UNREADABLE[name]
    ledger = read_ledger(module(text, LOOP), GRID)
    assert [words in problem for problem in ledger.problems] == [True]
    assert bool(ledger.rows) == (name == "loop")
    if words == UNKNOWN:
        on_host = read_ledger(module(f"{text}, is_host_transfer=true"), GRID)
        assert not on_host.rows
        assert not on_host.problems


DERIVED = {
    "jit(step)/for_gradients/psum": "gradients",
    "jit(step)/jvp(for_parameters)/all_gather": "parameters",
    "jit(step)/transpose(jvp(for_parameters))/reduce_scatter": "gradients",
    "jit(step)/transpose(jvp())/checkpoint/rematted_computation/for_parameters/all_gather": "parameters",
    "jit(step)/transpose(jvp())/checkpoint/for_activations/psum": "activation gradients",
    "jit(step)/transpose(jvp())/checkpoint/for_activations_by_hand/ppermute": "activations",
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


@pytest.mark.parametrize("op_name", [*DERIVED, *OF_PIPELINES])
def test_purpose_of_a_scope(op_name):
    """A transpose has the scope of its forward operation. So has a recomputed forward."""
    reduce = "%x = f64[8]{0} all-reduce(%p), replica_groups={{0,1},{2,3}}, to_apply=%add"
    permute = "%x = f32[8]{0} collective-permute(%p), source_target_pairs={{0,2},{2,0}}"
    made = f'{reduce if op_name in DERIVED else permute}, metadata={{op_name="{op_name}"}}'
    (entry,) = entries(module(made), {"pp": 2, "tp": 2})
    assert entry.purpose == (DERIVED | OF_PIPELINES)[op_name]
