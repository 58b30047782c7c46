"""Startup cost of a command line: `--help` of the smallest Typer app and of effllm, a `list`, and a name completion; alternating.

All are fresh processes with the same interpreter, so the difference to the bare app is what effllm's own modules and lookups add. `list`
and the completion find twenty models in a cache created for them.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from report import Figure

REPEATS, MODELS = 10, 20
PACKAGED = Path(__file__).resolve().parent.parent / "models" / "fable"
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
    """Medians; the commands alternate, so that interference affects all."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "bare.py"
        script.write_text(BARE_APP, encoding="utf-8")
        effllm = str(Path(sys.executable).with_name("effllm"))
        of_models = {"HF_HOME": str(_cache(Path(folder)))}
        completing = of_models | {"_EFFLLM_COMPLETE": "complete_bash", "COMP_WORDS": "effllm run org/", "COMP_CWORD": "2"}
        commands = {"typer": ([sys.executable, str(script), "--help"], {}), "effllm": ([effllm, "--help"], {}),
                    "list": ([effllm, "list"], of_models), "completion": ([effllm], completing)}
        seconds_by_command: dict[str, list[float]] = {name: [] for name in commands}
        for index in range(REPEATS + 1):
            for name, (command, env) in commands.items():
                seconds = _seconds(command, env)
                if index:  # the first time the disk is read
                    seconds_by_command[name].append(seconds)
    labels = {"typer": "start of a bare Typer app", "effllm": "start of effllm", "list": f"`list` of {MODELS} models and the packaged one",
              "completion": "a model's name completed"}
    for name, times in seconds_by_command.items():
        conditions = f"{'--help in ' if name in ('typer', 'effllm') else ''}a fresh process, median of {REPEATS}"
        yield Figure(f"start_ms_{name}", labels[name], conditions, statistics.median(times) * 1e3, "ms")


def _cache(folder: Path) -> Path:
    """A Hugging Face cache of small models, as created by a pull."""
    for number in range(MODELS):
        repo = folder / "hub" / f"models--org--repo{number:02}"
        snapshot = repo / "snapshots" / f"{number:040x}"
        snapshot.mkdir(parents=True)
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text(snapshot.name)
        for source in PACKAGED.iterdir():
            shutil.copy(source, snapshot)
    return folder


def _seconds(command: list[str], env: dict[str, str]) -> float:
    start = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | env)
    seconds = time.perf_counter() - start
    if "HF_HOME" in env and "repo00" not in done.stdout:
        raise SystemExit(f"{command} did not see the models: {done.stdout}{done.stderr}")
    return seconds
