"""Initial weights of a user: checks before a run, and their file."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from compare.numerics.parameters import parameter_table, storage_dtype
from compare.spec.experiment import Experiment, ExperimentError
from compare.system.disk import write_atomically

INIT = "init.safetensors"
LISTED = 3


def checked_weights(
    weights: Mapping[str, np.ndarray], experiment: Experiment, origin: str
) -> dict[str, np.ndarray]:
    """Check weights by canonical name, of any float dtype, and convert them to the experiment's dtype.

    Raises:
        ExperimentError: a name is missing or unknown, a shape differs, or an entry is not finite.
        RecordError: a tensor cannot be read.
    """
    given_shapes = {name: np.shape(weights[name]) for name in weights}
    shapes = {parameter.name: parameter.shape for parameter in parameter_table(experiment.model)}
    require_fit(given_shapes, shapes, origin)
    dtype, checked = storage_dtype(experiment), {}
    for name in shapes:
        given = weights[name]
        if given.dtype.kind != "f":
            raise ExperimentError(f"{origin}: {name} is {given.dtype}: give float16, float32 or float64")
        with np.errstate(over="ignore"):  # overflows are found below
            array = np.ascontiguousarray(given, dtype)
        if bad := int(array.size - np.isfinite(array).sum()):
            raise ExperimentError(
                f"{origin}: {bad} of {array.size} entries of {name} are not finite as {dtype}: give others"
            )
        checked[name] = array
    return checked


def require_fit(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], origin: str
) -> None:
    """Reject tensors of other names or shapes than expected. Raises ExperimentError with both."""
    wrong = []
    for verb, odd in (
        ("it lacks", [name for name in expected if name not in found]),
        ("the model has no", [name for name in found if name not in expected]),
    ):
        if odd:
            more = f" and {len(odd) - LISTED} more" if len(odd) > LISTED else ""
            wrong.append(f"{verb} {', '.join(odd[:LISTED])}{more}")
    if wrong:
        why = f" has {len(found)} tensors and the model {len(expected)}: {'; '.join(wrong)}"
    else:
        odd = [name for name, shape in expected.items() if found[name] != shape]
        if not odd:
            return
        why = f": {odd[0]} has shape {found[odd[0]]} and the model's {expected[odd[0]]}"
    raise ExperimentError(f"{origin}{why}: set --model.* as these weights need")


def write_weights(path: Path, weights: Mapping[str, np.ndarray]) -> None:
    """Write weights, canonical name -> full tensor, as safetensors, atomically."""
    write_atomically(path, save({name: np.ascontiguousarray(array) for name, array in weights.items()}))
