"""How far two checkpoints are from each other, whatever engines and layouts wrote them."""

from pathlib import Path

from compare.checkpoint.description import groups
from compare.checkpoint.reader import CheckpointReader
from compare.judge.tensor_errors import worst_tensor


def difference(found: Path, expected: Path) -> dict[str, float]:
    """The largest relative error of any tensor, of the weights and of each moment: see `relative_error`.

    Raises:
        CheckpointError: one of them cannot be read.
    """
    readers = [CheckpointReader(folder) for folder in (found, expected)]
    each = [groups(reader.description.experiment) for reader in readers]
    return {
        group: worst_tensor(*(reader.group(group) for reader in readers))[0]
        for group in each[1]
        if group in each[0]
    }
