"""Where in the program a collective is called: what the frames of its thread say."""

import os
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import cast

import torch
import typing_extensions
from torch.optim import Optimizer


def _folders(*names: str) -> tuple[str, ...]:
    return tuple(sysconfig.get_path(name) + os.sep for name in names)


_STANDARD_LIBRARY, _INSTALLED = _folders("stdlib", "platstdlib"), _folders("purelib", "platlib")
_PACKAGE = Path(__file__).parents[1]
_TORCH = str(Path(torch.__file__).parent) + os.sep
_NOT_A_PLACE = (
    _TORCH,
    *(str(_PACKAGE / name) + os.sep for name in ("comm", "measure")),
    typing_extensions.__file__,  # its decorators wrap functions of PyTorch
    "<frozen ",
)
_STEP = cast(FunctionType, Optimizer.profile_hook_step(lambda optimizer: None)).__code__
"""PyTorch's wrapper around `step` of every optimizer."""
_FSDP2 = str(Path("distributed", "fsdp", "_fully_shard"))


def line_of(frame: FrameType | None) -> str:
    """The innermost line outside of PyTorch; in a callback of PyTorch's own, the outermost inside; or ''."""
    found = None
    while frame:
        file = frame.f_code.co_filename
        if _is_a_place(file):
            found = frame
            break
        if file.startswith(_TORCH):
            found = frame
        frame = frame.f_back
    if found is None:
        return ""
    return f"{Path(found.f_code.co_filename).name}:{found.f_lineno} ({found.f_code.co_name})"


def is_of_optimizer(frame: FrameType | None) -> bool:
    """True within the step of an optimizer, also after that of another one inside of it."""
    return _runs(frame, lambda code: code is _STEP)


def is_of_fsdp(frame: FrameType | None) -> bool:
    """True within what FSDP2 does with the gradients of a unit."""
    return _runs(frame, lambda code: _FSDP2 in code.co_filename)


def _runs(frame: FrameType | None, is_asked: Callable[[CodeType], bool]) -> bool:
    while frame and not is_asked(frame.f_code):
        frame = frame.f_back
    return frame is not None


def _is_a_place(file: str) -> bool:
    """Neither in PyTorch nor in what lies between: decorators, contexts and threads of Python's library."""
    if file.startswith(_NOT_A_PLACE):
        return False
    return file.startswith(_INSTALLED) or not file.startswith(_STANDARD_LIBRARY)
