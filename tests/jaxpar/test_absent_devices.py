"""A step compiled for devices that are not here: what XLA writes for TPUs, and the compiler if there."""

import importlib.metadata
import re

import jax
import pytest
from msgspec.structs import replace

from compare.contract.absent import AbsentRequest
from compare.spec.experiment import ExperimentError, Layout, edited
from jaxpar.measure.hlo import collectives

HAS_LIBTPU = bool(list(importlib.metadata.distributions(name="libtpu")))
GATHER = (
    "%{name} = bf16[4,8]{{1,0:T(8,128)(2,1)S(1)}} all-gather(%p), channel_id={channel}, "
    'replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}, frontend_attributes={{chain_id="{chain}"}}'
)
PROGRAM = """HloModule jit_step

%begin.1 (p: bf16[1,8]) -> bf16[4,8] {{
  {first}
}}

%end.1 (p: bf16[1,8]) -> bf16[4,8] {{
  {second}
}}

%body.1 (p: (s32[])) -> (s32[]) {{
  %a = bf16[4,8] fusion(%p), kind=kCustom, calls=%begin.1
  %b = bf16[4,8] fusion(%a), kind=kCustom, calls=%end.1
}}

%test.1 (p: (s32[])) -> pred[] {{
  %n = s32[]{{:T(128)}} constant(12)
  %i = s32[]{{:T(128)}} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{{:T(512)}} compare(%i, %n), direction={direction}
}}

ENTRY %main () -> (s32[]) {{
  ROOT %w = (s32[]) while(%t), condition=%test.1, body=%body.1
}}
"""


def program(*, chain: int = 3, direction: str = "LT") -> str:
    """A loop over a gather in two fusions, the second of this chain."""
    first = GATHER.format(name="g.1", channel=7, chain=3)
    second = GATHER.format(name="g.2", channel=7, chain=chain)
    return PROGRAM.format(first=first, second=second, direction=direction)


def test_clones_of_a_chain_are_one_collective_of_a_loop_with_a_bound():
    (gather,) = collectives(program(), {"dp": 4})
    assert (gather.calls, gather.arrays, gather.loops) == ((12,), (64,), (12,))
    assert len(collectives(program(chain=4), {"dp": 4})) == 2, "another chain is another collective"
    # On a CPU or a GPU a loop without a trip count begins at a number that is data.
    for without_bound in (program(direction="GE"), re.sub(r":T\([\d,]+\)", "", program())):
        problems = []
        collectives(without_bound, {"dp": 4}, problems=problems)
        assert len(problems) == 1
        assert "has no known trip count" in problems[0]


@pytest.mark.slow
@pytest.mark.skipif(not HAS_LIBTPU, reason="libtpu, the TPU compiler, is not installed")
def test_four_chips_that_are_not_here_have_a_ledger_and_a_memory(tiny):
    from jaxpar.ahead_of_time import absent_devices, compile_step_ahead

    single = edited(tiny, {"precision": {"dtype": "float32"}})
    experiment = replace(single, layout=Layout(dp_shard=4, zero=3))
    request = AbsentRequest(engine="jax-manual", experiment=experiment, compiler="tpu", topology="v5e:2x2")
    with jax.enable_x64(False):  # as every run that is not in float64: a loop counts in 32 bits
        found = compile_step_ahead(request)
    assert found.ledger.problems == []
    assert {"all_gather", "all_reduce"} <= {row.kind for row in found.ledger.rows}
    assert found.state_bytes < found.peak_bytes
    with pytest.raises(ExperimentError, match="no float64"):
        compile_step_ahead(replace(request, experiment=replace(tiny, layout=experiment.layout)))
    with pytest.raises(ExperimentError, match="v9z:2x2"):
        absent_devices("tpu", "v9z:2x2")
