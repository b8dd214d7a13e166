"""A step of jaxpar under the profiler, in this process."""

import jax

from compare.contract.recording import Progress
from compare.numerics.data import open_corpus
from compare.numerics.stream import arrays_of_step
from compare.spec.experiment import Data, Experiment, Model, Train
from jaxpar.comm.mesh import make_mesh
from jaxpar.measure.profile import Execution, recorded
from jaxpar.step import compile_step, device_scalars
from jaxpar.train import prepare

EXPERIMENT = Experiment(
    model=Model(n_layer=4, n_head=4, n_embd=16, block_size=8, vocab_size=65, bias=True),
    data=Data(source="synthetic"),
    train=Train(max_iters=2, batch_size=8, gradient_accumulation_steps=2),
)


def watch(engine: str, experiment: Experiment) -> tuple[list[Execution], str]:
    """Two steps in this process, the second of them watched; and the HLO that ran. JAX has its devices."""
    layout = experiment.layout
    mesh = make_mesh(layout, platform="cpu")
    sharded, state = prepare(engine, experiment, mesh=mesh)
    compiled, corpus = compile_step(sharded, state, experiment), open_corpus(experiment)
    hlo = compiled.as_text()
    assert hlo

    def step(number: int) -> None:
        batch = jax.device_put(arrays_of_step(corpus, experiment, number), sharded.batch)
        scalars = device_scalars(experiment, Progress(updates=number))
        outputs = compiled(state.params, state.opt_state, batch, scalars)
        state.params, state.opt_state, _, _ = jax.block_until_ready(outputs)

    step(0)
    with recorded(hlo, list(mesh.devices.flat)) as found:
        step(1)
    return found, hlo
