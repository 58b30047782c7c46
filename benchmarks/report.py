"""Output of every benchmark: a Markdown table for people, one JSON line for programs, and a file under `results/`.

The file is named after the benchmark and the machine and starts with date, machine and commit, because figures without them cannot be
compared. The next run on the same machine replaces it; the history is in git.
"""

import argparse
import json
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import index
from effllm.kernels.target import cpu_features, target
from effllm.offload.hardware import cpu_name, cpu_threads, memory_total

RESULTS = Path(__file__).resolve().parent / "results"
GIB = 1 << 30


def parser_of(text: str | None, threads: bool = False) -> argparse.ArgumentParser:
    """The argument parser of a script with description `text`, with the options shared by all scripts that keep results, and `--threads`
    where `threads` is set."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    if threads:
        parser.add_argument("--threads", type=int, default=cpu_threads())
    parser.add_argument("--no-results", action="store_true", help="print, keep nothing")
    return parser


@dataclass(frozen=True)
class Figure:
    """One measured number: `key` names it in the JSON line, `conditions` says how it was measured."""

    key: str
    what: str
    conditions: str
    value: float
    unit: str


def commit() -> str:
    """The commit of this checkout, marked if files differ from it; results just written by another benchmark do not count."""
    def git(*arguments: str) -> str:
        result = subprocess.run(["git", *arguments], cwd=RESULTS.parent.parent, capture_output=True, text=True, check=False)
        return result.stdout.strip()

    description = git("describe", "--always", "--abbrev=10")
    differs = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    return description + ("-dirty" if differs else "") or "none"


def context() -> dict[str, str]:
    """Date, machine and software of this run."""
    system = f"{platform.system()} {platform.release().partition('-')[0]}"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{cpu_name()} ({generation()}), {cpu_threads()} cores, {memory_total() / GIB:.0f} GiB, {system}",
        "software": f"effllm {version('effllm')}, Python {platform.python_version()}, NumPy {version('numpy')}, Numba {version('numba')}",
        "commit": commit(),
    }


def generation() -> str:
    """LLVM's name of the processor. A virtual machine may give the number of an older one; with a matrix unit, which that has not, it is
    named by it."""
    name = target()[0]
    return "amx" if "amx-int8" in cpu_features() and not name.endswith("rapids") else name


def machine_slug() -> str:
    """The machine as part of a file name: `amd-epyc-znver4-2-cores`. Virtual machines leave the generation out of the processor's name."""
    words = re.sub(r"\((r|tm)\)|\bcpu\b|@.*", " ", cpu_name().lower())
    return re.sub(r"[^a-z0-9]+", "-", f"{words} {generation()} {cpu_threads()} cores").strip("-")


def table(figures: list[Figure]) -> str:
    rows = [f"| {figure.what} | {figure.conditions} | {_rounded(figure.value)} {figure.unit} |" for figure in figures]
    return "\n".join(["| measured | conditions | figure |", "|---|---|---:|", *rows])


def publish(name: str, title: str, intro: str, figures: list[Figure], keep: bool = True) -> Path | None:
    """Print table and JSON line; write them to `results/<name>-<machine>.md` unless `keep` is false."""
    facts = context()
    heading = "\n".join(f"- {key}: {value}" for key, value in facts.items())
    values = {figure.key: float(f"{figure.value:.5g}") for figure in figures}
    line = json.dumps({"benchmark": name, **facts, "figures": values})
    text = f"# {title}\n\n{intro}\n\n{heading}\n\n{table(figures)}\n"
    path = RESULTS / f"{name}-{machine_slug()}.md"
    if keep:
        RESULTS.mkdir(exist_ok=True)
        path.write_text(f"{text}\n```json\n{line}\n```\n", encoding="utf-8")
        index.write()
    sys.stdout.write(f"{text}\n{line}\n")
    return path if keep else None


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
