"""What the record says of this machine."""

import platform

from compare.host.facts import cpu_model

TWO_CORES = """\
processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC
bugs\t\t: a : b

processor\t: 1
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC
"""


def test_processors_of_one_name_are_told_apart(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(TWO_CORES)
    assert cpu_model(cpuinfo) == "AMD EPYC (family 25, model 17)"
    cpuinfo.write_text(TWO_CORES.replace("17", "26"))
    assert cpu_model(cpuinfo) == "AMD EPYC (family 25, model 26)"


def test_a_system_that_does_not_tell_the_model(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    elsewhere = platform.processor() or platform.machine()
    assert cpu_model(cpuinfo) == elsewhere  # no such file, as on macOS
    cpuinfo.write_text("processor\t: 0\nCPU implementer\t: 0x41\n")  # as on ARM
    assert cpu_model(cpuinfo) == elsewhere
