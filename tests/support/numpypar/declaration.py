"""All that the harness knows of this side: the entry point `shardpair.sides` names `SIDE`."""

from compare.spec.engines.engine import Abilities, Engine, Layouts, Side
from compare.spec.experiment import Layout


def _not_in_numpy(layout: Layout) -> str:
    if layout.devices != layout.dp_replicate:
        return "the loop is data-parallel and nothing else: leave dp_shard, tp and pp at 1"
    return ""


SIDE = Side(
    name="numpypar",
    python_flag="numpy_python",
    engines=(
        Engine(
            name="numpy-loop",
            side="numpypar",
            gradient_sync=("flat",),
            decides="a loop over devices in one process",
            can=Abilities(gpu="NumPy knows no other device"),
            layouts=Layouts(refuses=_not_in_numpy),
        ),
    ),
)
