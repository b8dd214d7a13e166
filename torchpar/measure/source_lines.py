"""Source lines of messages: the innermost line that is not PyTorch's."""

import os
from pathlib import Path
from types import FrameType

import torch
import typing_extensions

_STANDARD_LIBRARY, _TORCH = (str(Path(package.__file__).parent) + os.sep for package in (os, torch))
_INSTALLED = str(Path(_TORCH).parent) + os.sep
_NOT_A_PLACE = (
    _TORCH,
    *(str(Path(__file__).parents[1] / name) + os.sep for name in ("comm", "measure")),
    typing_extensions.__file__,  # its decorators wrap functions of PyTorch
    "<frozen ",
)
_OWN = tuple(str(Path(__file__).parents[2] / name) + os.sep for name in ("torchpar", "compare"))


def line_of(frame: FrameType | None, *, of_user: bool = False) -> str:
    """The innermost line outside of PyTorch. In a callback of PyTorch: its outermost line. '' for none.

    The line is `of_user` if it is also outside of this package and of installed packages, if there is one.
    """
    inside, installed = None, None
    while frame and not (
        _is_a_place(file := frame.f_code.co_filename) and not (of_user and _is_installed(file))
    ):
        inside = frame if file.startswith(_TORCH) else inside
        installed = installed or (frame if _is_a_place(file) else None)
        frame = frame.f_back
    if place := frame or installed or inside:
        return f"{Path(place.f_code.co_filename).name}:{place.f_lineno} ({place.f_code.co_name})"
    return ""


def _is_installed(file: str) -> bool:
    return file.startswith((_INSTALLED, *_OWN))


def _is_a_place(file: str) -> bool:
    """True outside of PyTorch, its programs, and decorators, contexts and threads of Python's library."""
    generated = os.environ.get("TORCHINDUCTOR_CACHE_DIR")  # inductor sets it: its programs differ by rank
    if file.startswith(_NOT_A_PLACE) or (generated and file.startswith(generated)):
        return False
    return file.startswith(_INSTALLED) or not file.startswith(_STANDARD_LIBRARY)
