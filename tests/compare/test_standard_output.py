"""Standard output that is full, closed, or read no further; and Ctrl-C before the command has begun."""

import contextlib
import os
import signal
import sys

import processes
import pytest

from compare.cli import main
from compare.terminal import standard_output


def test_a_full_standard_output_is_one_line_and_a_failure(capsys):
    with open("/dev/full", "w") as full, contextlib.redirect_stdout(full):
        assert main(["list"]) == 1
        standard_output.flush()
    assert capsys.readouterr().err == "shardpair: error: standard output: No space left on device\n"


def test_nobody_reads_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe, contextlib.redirect_stdout(pipe):
        assert main(["list"]) == 0
        pipe.flush()  # where it goes now, nothing is refused


def test_what_is_buffered_is_written_out_before_the_end(monkeypatch):
    with open("/dev/full", "w") as full, contextlib.redirect_stdout(full):
        print("a result")
        unwritten = standard_output.flush()
        assert unwritten is not None
        assert unwritten.errno == 28
        assert standard_output.flush() is None
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe, contextlib.redirect_stdout(pipe):
        print("a result")
        assert standard_output.flush() is None
    monkeypatch.setattr(sys, "stdout", None)  # closed: shardpair ... >&-
    assert standard_output.flush() is None


INTERRUPTED_IMPORT = """
import importlib.abc, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)

class PressCtrlC(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, PressCtrlC())
from compare.__main__ import main
sys.argv[1:] = ["list"]
main()
"""


@pytest.mark.parametrize("module", ["compare.cli", "numpy._core._multiarray_umath", "tyro"])
def test_ctrl_c_while_modules_are_imported(module):
    code = INTERRUPTED_IMPORT.format(module=module)
    done = processes.run([sys.executable, "-c", code])
    assert (done.returncode, done.stderr) == (130, "shardpair: interrupted\n")


def test_ctrl_c_later_is_left_to_the_command(monkeypatch):
    from compare import __main__

    seen = []
    monkeypatch.setattr("compare.cli.main", lambda: seen.append(signal.getsignal(signal.SIGINT)) or 0)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit) as ended:
            __main__.main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == 0
    assert seen == [signal.default_int_handler]
