"""`make docs`: draw every picture of the documentation, from the code and from real runs.

Pages are photographed by Chromium (`chromium` on PATH; on Debian `apt-get install chromium`).
"""

import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from compare.commands.profile.figures import schedule_figure
from compare.show.figures import Figure, save_figures

PICTURES = Path(__file__).parent / "pictures"
SHARDPAIR = [sys.executable, "-m", "compare"]
PAGES = {
    "report": (["run", "demo"], "report.html", 1385),
    "lesson": (["lesson", "tensor_parallel"], "lesson.html", 1500),
}
"""For each picture: the command, the page that it writes, and the height to keep in pixels."""


def schedules() -> Sequence[Figure]:
    """A timeline for each pipeline schedule, from the simulator: 4 ranks, 8 microbatches."""
    chunks = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1}
    return [figure for name, count in chunks.items() if (figure := schedule_figure(name, 4, 8, count))]


def photograph(page: Path, picture: Path, *, height: int, width: int = 1440) -> None:
    """Save the top of an HTML page as a PNG of at most 256 colours. Raises FileNotFoundError: no Chromium."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise FileNotFoundError("no Chromium on PATH: install it, for example by apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "shot.png"
        flags = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={folder}/profile"]
        size = [f"--window-size={width},{height}", f"--screenshot={shot}"]
        subprocess.run([browser, *flags, *size, page.resolve().as_uri()], check=True, capture_output=True)
        buffer = io.BytesIO()
        Image.open(shot).convert("RGB").quantize(256).save(buffer, "PNG", optimize=True)
    picture.write_bytes(buffer.getvalue())


def main() -> None:
    """Draw the schedules, run each command of `PAGES`, and photograph its page."""
    save_figures(PICTURES / "schedules.png", schedules())
    for name, (command, page, height) in PAGES.items():
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
            subprocess.run([*SHARDPAIR, *command, "--quiet"], cwd=folder, env=environment, check=True)
            (written,) = Path(folder).glob(f"runs/*/{page}")
            photograph(written, PICTURES / f"{name}.png", height=height)


if __name__ == "__main__":
    main()
