"""Source lines of instructions, from the tables of stack frames in the text of an HLO module.

    FileNames              1 "model.py"
    FunctionNames          1 "loss"
    FileLocations          1 {file_name_id=1 function_name_id=1 line=5 ...}
    StackFrames            1 {file_location_id=1 parent_frame_id=1}

A frame's parent has the number before `parent_frame_id`; 0 is none.
"""

import re
from pathlib import Path

from compare.pipeline.instructions import SourceLine

_TABLE = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n((?:\d+ .*\n)+)", re.MULTILINE)
_ENTRY = re.compile(r"^(\d+) (.*)$", re.MULTILINE)
_NUMBER = re.compile(r"(\w+)=(\d+)")
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
WRAPPERS = Path(__file__).parents[1] / "comm"
"""Every collective of jaxpar is called there: who called it is of interest."""


class SourceLines:
    """Source lines of the instructions of a module, given its text."""

    def __init__(self, hlo: str):
        tables = {name: dict(_ENTRY.findall(body)) for name, body in _TABLE.findall(hlo)}
        files, functions = (
            {number: text.strip('"') for number, text in tables.get(name, {}).items()}
            for name in ("FileNames", "FunctionNames")
        )
        self._lines: dict[str, SourceLine] = {}
        for number, text in tables.get("FileLocations", {}).items():
            of = dict(_NUMBER.findall(text))
            file, function = files.get(of["file_name_id"], ""), functions.get(of["function_name_id"], "")
            self._lines[number] = SourceLine(file, int(of["line"]), function)
        frames = tables.get("StackFrames", {})
        self._frames = {number: dict(_NUMBER.findall(text)) for number, text in frames.items()}

    def stack(self, instruction: str) -> list[SourceLine]:
        """The line that made it and its callers, the innermost first, without jaxpar's wrappers.

        [] if nothing tells.
        """
        match, lines = _FRAME.search(instruction), []
        frame = match[1] if match else ""
        while (entry := self._frames.get(frame)) and len(lines) < len(self._frames):
            lines.append(self._lines[entry["file_location_id"]])
            frame = str(int(entry.get("parent_frame_id", "1")) - 1)
        return [line for line in lines if Path(line.file).parent != WRAPPERS] or lines
