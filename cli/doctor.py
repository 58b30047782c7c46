"""`effllm doctor`: what was found on this machine, which kernels it gets, and whether a model really runs.

The trial runs in a child process: an instruction that the processor lacks ends the process that meets it, and that must not be this one.
"""

from __future__ import annotations

import json as jsonlib
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from .flags import add_command, flag
from .loading import follow
from .options import OUTPUT, Json
from .screen import Screen

if TYPE_CHECKING:
    from ..runtime.diagnose import Diagnosis, KernelChoice, Measurement

TRIAL = ("run", "fable", "--raw", "Once upon a time", "-n", "8", "--temp", "0", "--device", "cpu", "--json")
TRIAL_TIMEOUT_S = 300

Warm = Annotated[bool, flag(OUTPUT, "--warm", "", "compile and measure the kernels now, so that the next run starts at once")]


def register(app: typer.Typer) -> None:
    add_command(app, "doctor", "look around", doctor)


def doctor(context: typer.Context, warm: Warm = False, json: Json = False) -> int:
    """What this machine offers, which kernels run on it, and whether they work."""
    from ..runtime.diagnose import diagnose, warm_up

    screen = Screen(context.obj)
    if warm:
        list(follow(warm_up(), screen, type(None)))
    report = diagnose()
    works, verdict = trial()
    if json:
        screen.json({**report.to_json(), "trial": {"ok": works, "message": verdict}})
    else:
        show_report(screen, report)
        screen.pairs((("trial", verdict),))
    return 0 if works else 1


def trial() -> tuple[bool, str]:
    """Let the packaged model write a few words. (whether it did, what happened)."""
    try:
        ran = subprocess.run([sys.executable, "-P", "-m", "effllm", *TRIAL], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                             timeout=TRIAL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return False, f"fable did not answer in {TRIAL_TIMEOUT_S} s"
    if ran.returncode < 0:
        return False, f"fable's process ended by {signal.Signals(-ran.returncode).name}: a kernel uses what this processor lacks"
    if ran.returncode:
        return False, f"fable did not answer: {(ran.stderr.strip().splitlines() or ['no message'])[0]}"
    figures = jsonlib.loads(ran.stdout)
    return True, f"fable wrote {len(figures['token_ids'])} tokens, the first after {figures['timings']['ttft_s']:.2f} s"


def show_report(screen: Screen, report: Diagnosis) -> None:
    from ..offload.size import format_size

    machine = report.machine
    limit = f", limited to {format_size(machine.memory_limit)}" if machine.memory_limit else ""
    quota = f", quota of {machine.cpu_quota:g} CPUs" if machine.cpu_quota else ""
    libraries = ", ".join(f"{name} {number}" for name, number in report.libraries.items())
    gpu = ", ".join(machine.gpus) or "none found"
    if machine.gpus and not report.torch:
        gpu += ", not used: torch is not installed (pip install 'effllm[cuda]')"
    if report.cache_folder is None:
        cache = "no folder can be written: kernels are compiled at every start"
    else:
        cache = f"{report.cache_folder} ({'empty: `effllm doctor --warm` fills it' if report.cold else 'filled'})"
    screen.pairs((
        ("effllm", f"{report.version}, Python {report.python}, {libraries}"),
        ("system", machine.system),
        ("processor", f"{machine.cpu}: {machine.cores} cores, {machine.threads} threads used{quota}"),
        ("instructions", " ".join(machine.simd) or "none known"),
        ("memory", f"{format_size(machine.memory_total)}, {format_size(machine.memory_available)} available{limit}"),
        ("huge pages", machine.huge_pages),
        ("GPU", gpu),
        ("kernel cache", cache),
    ))
    screen.line()
    screen.table(("kernel", "stored", "tokens", "runs as", "because"),
                 [(each.op, each.stored, str(each.columns), each.chosen, reason(each)) for each in report.kernels], right=(2,))
    screen.line()
    show_measured(screen, report.measured)
    screen.line()


def show_measured(screen: Screen, measured: tuple[Measurement, ...]) -> None:
    """Dot products against table lookup, as measured on this machine."""
    if not measured:
        screen.line("dot products or table lookup: nothing measured yet; a model that needs it measures, or `effllm doctor --warm`")
        return
    rows = [(str(each.case.bits), str(each.case.group), str(each.case.depth), str(each.case.threads), f"{each.timing.dot / 1e9:.1f}",
             f"{each.timing.lut / 1e9:.1f}", each.kernel, each.reason) for each in measured]
    screen.table(("bits", "group", "inputs", "threads", "dot", "lut", "runs as", "because"), rows, right=(0, 1, 2, 3, 4, 5))
    screen.line("dot, lut: billions of weights a second for one token")


def reason(choice: KernelChoice) -> str:
    """Why something slower runs, or for one token of a low-bit weight something else; nothing where the first choice does."""
    told = choice.fallback or (choice.op == "low-bit matrix" and choice.columns == 1)
    return "; ".join(f"{name}: {why}" for name, why in choice.declined) if told else ""
