"""What a command line costs before it does anything: `--help` of the smallest Typer app, and of effllm, run in turns.

Both print a help page in a fresh process with the same interpreter, so the difference is what effllm's own modules add.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from report import Figure

TURNS = 10
BARE_APP = '''
import typer

app = typer.Typer()


@app.command()
def run(model: str, temperature: float = 0.8) -> None:
    """Run a model."""


@app.command()
def chat(model: str, temperature: float = 0.8) -> None:
    """Talk to a model."""


app()
'''


def measure() -> Iterator[Figure]:
    """Medians; the two apps alternate, so that a busy moment strikes both."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "bare.py"
        script.write_text(BARE_APP, encoding="utf-8")
        bare_command = [sys.executable, str(script), "--help"]
        effllm_command = [str(Path(sys.executable).with_name("effllm")), "--help"]
        bare, effllm = [], []
        for command in (bare_command, effllm_command):
            _seconds(command)
        for _ in range(TURNS):
            bare.append(_seconds(bare_command))
            effllm.append(_seconds(effllm_command))
    bare_ms, effllm_ms = statistics.median(bare) * 1e3, statistics.median(effllm) * 1e3
    conditions = f"--help in a fresh process, median of {TURNS}"
    yield Figure("start_ms_typer", "start of a bare Typer app", conditions, bare_ms, "ms")
    yield Figure("start_ms_effllm", "start of effllm", conditions, effllm_ms, "ms")


def _seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start
