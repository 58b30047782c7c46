"""`effllm doctor`: this machine's hardware, its kernels, and whether a model runs.

The trial runs in a child process, which an unsupported instruction would kill."""

from __future__ import annotations

import json as jsonlib
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from .. import UsageError
from .fitted_table import fitted_table
from .flags import add_command, flag
from .loading import final_result, show_progress
from .options import COMPUTE, OUTPUT, Json
from .screen import Screen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..offload.hardware import Machine
    from ..runtime.planning.diagnose import Diagnosis, KernelChoice, Measurement
    from ..runtime.planning.roofs import Roofs

TRIAL = ("run", "fable", "--raw", "Once upon a time", "-n", "8", "--temp", "0", "--device", "cpu", "--json")
# A run with built-in settings: no settings file is read.
TRIAL_PROGRAM = """
import sys
from effllm.cli.app import main
from effllm.cli.environment import Environment
environment = Environment.of_process()
environment.settings = {}
sys.exit(main(sys.argv[1:], environment))
"""
TRIAL_TIMEOUT_S = 300
MAX_DISTURBED = 4  # disturbed measurements that are named

Probe = Annotated[bool, flag(OUTPUT, "--probe", "", "measure memory, kernels and disk again")]
NoProbe = Annotated[bool, flag(OUTPUT, "--no-probe", "", "measure nothing: show what is known")]
Warm = Annotated[bool, flag(OUTPUT, "--warm", "", "compile and measure the kernels now, so that the next run starts at once")]

Threads = Annotated[int | None, flag(COMPUTE, "-t --threads", "N", "CPU threads to measure with (all physical cores)")]


def register(app: typer.Typer) -> None:
    add_command(app, "doctor", "inspect", doctor)


def doctor(context: typer.Context, warm: Warm = False, probe: Probe = False, no_probe: NoProbe = False, threads: Threads = None,
           json: Json = False) -> int:
    """Check this machine: what it has, how fast it is, which kernels it runs, and whether they work."""
    from ..runtime.planning.diagnose import diagnose, warm_up
    from ..runtime.prepare import EngineOptions, worker_count

    screen, workers = Screen(context.obj), worker_count(EngineOptions(threads=threads))
    if probe and no_probe:
        raise UsageError("--probe and --no-probe contradict each other", "give one of them")
    if warm:
        list(show_progress(warm_up(workers), screen, type(None)))
    report = diagnose(measure_rates(screen, workers, probe, no_probe), screen.environment.variables)
    works, verdict = trial()
    if json:
        screen.json({**report.to_json(), "trial": {"ok": works, "message": verdict}})
    else:
        show_report(screen, report)
        screen.pairs((("trial", verdict),))
    return 0 if works else 1


def measure_rates(screen: Screen, threads: int, remeasure: bool, no_probe: bool) -> Roofs:
    """The measured rates of this machine for that many threads. Missing ones are measured now, unless `no_probe`; with `remeasure`, all."""
    from ..runtime.planning import roofs
    from ..runtime.planning.diagnose import roofs_wanted

    wanted = roofs_wanted(screen.environment.variables, threads)
    stored = roofs.known(wanted)
    missing = roofs.everything(wanted, stored) if remeasure else None if no_probe else roofs.missing(wanted, stored)
    return stored if missing is None else final_result(roofs.probe(missing, stored), screen, roofs.Roofs)


def trial() -> tuple[bool, str]:
    """Let the packaged model generate a few words, ignoring the user's settings. Returns (success, message)."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("EFFLLM_")}
    try:
        process = subprocess.run([sys.executable, "-P", "-c", TRIAL_PROGRAM, *TRIAL], stdin=subprocess.DEVNULL, capture_output=True,
                                 text=True, timeout=TRIAL_TIMEOUT_S, check=False, env=variables)
    except subprocess.TimeoutExpired:
        return False, f"fable did not answer in {TRIAL_TIMEOUT_S} s"
    if process.returncode < 0:
        return False, describe_signal(-process.returncode)
    if process.returncode:
        errors = [line for line in process.stderr.splitlines() if line.startswith("effllm: ")] or process.stderr.strip().splitlines()[-1:]
        return False, f"fable did not answer: {errors[-1].removeprefix('effllm: ') if errors else 'no message'}"
    figures = jsonlib.loads(process.stdout)
    return True, f"fable wrote {len(figures['token_ids'])} tokens, the first after {figures['timings']['ttft_s']:.2f} s: effllm works here"


def describe_signal(number: int) -> str:
    """The signal that killed the trial, and its likely cause."""
    name = signal.Signals(number).name if number in {each.value for each in signal.Signals} else f"signal {number}"
    causes = {"SIGILL": "a kernel uses an instruction that this processor lacks",
              "SIGKILL": "the system killed it, usually for lack of memory (or another program did)"}
    return f"fable's process was killed by {name}: {causes.get(name, 'a bug in effllm or a library; effllm run fable --debug says more')}"


def show_report(screen: Screen, report: Diagnosis) -> None:
    from ..offload.size import format_size

    machine = report.machine
    limit = f", limited to {format_size(machine.memory_limit)}" if machine.memory_limit else ""
    quota = f", quota of {machine.cpu_quota:g} CPUs" if machine.cpu_quota else ""
    libraries = ", ".join(f"{name} {number}" for name, number in report.libraries.items())
    gpus = describe_gpus(machine)
    if machine.gpus and not report.torch:
        gpus += ", not used: torch is not installed (pip install 'effllm[cuda]')"
    if report.cache_folder is None:
        cache = "cannot be written, or its disk is full: kernels are compiled at every start"
    else:
        cache = f"{report.cache_folder} ({'empty: `effllm doctor --warm` fills it' if report.cold else 'filled'})"
    screen.pairs((
        ("effllm", f"{report.version}, {libraries}"),
        ("Python", f"{report.python} ({report.executable})"),
        ("system", machine.system),
        ("processor", f"{machine.cpu}: {machine.cores} cores, {machine.threads} threads used{quota}"),
        ("instructions", " ".join(machine.simd) or "none known"),
        ("memory", f"{format_size(machine.memory_total)}, {format_size(machine.memory_available)} available{limit}"),
        ("huge pages", machine.huge_pages),
        ("GPU", gpus),
        ("kernel cache", cache),
    ))
    screen.line()
    screen.table(("kept", "where", "size", "free there"),
                 [(place.name, str(place.path), format_size(place.nbytes),
                   "unknown" if place.free_nbytes is None else format_size(place.free_nbytes)) for place in report.places], right=(2, 3))
    screen.line()
    show_roofs(screen, report.roofs)
    screen.line()
    show_kernels(screen, report.kernels)
    screen.line()
    show_measured(screen, report.measured)
    screen.line()


def show_kernels(screen: Screen, kernels: Sequence[KernelChoice]) -> None:
    """At a terminal, operations with a single fast kernel that runs share one row, to keep the report short."""
    ordinary = [each for each in kernels if each.chosen == "compiled" and not each.fallback] if screen.report_width is not None else []
    rows = [(each.op, each.stored, str(each.columns), each.chosen, reason(each)) for each in kernels if each not in ordinary]
    if ordinary:
        rows.append((f"{len(ordinary)} others", "", "", "compiled", "native code"))
    fitted_table(screen, ("kernel", "stored", "tokens", "runs as", "because"), rows, ("tokens",), spare=("because",))
    if ordinary:
        screen.sentence("effllm doctor | less -S shows every one, and why it was chosen")


def describe_gpus(machine: Machine) -> str:
    """GPUs with their memory, where known."""
    from ..offload.size import format_size

    def memory(nbytes: int | None) -> str:
        return "unknown" if nbytes is None else format_size(nbytes)

    return ", ".join(f"{gpu.name} (memory {memory(gpu.memory)}, free {memory(gpu.free)})" for gpu in machine.gpus) or "none found"


def show_roofs(screen: Screen, roofs: Roofs) -> None:
    """The rates that predictions are based on."""
    from ..offload.size import format_size

    machine = roofs.machine
    if machine is None:
        screen.pairs([("speed", "not measured with these kernels and this many threads; the same command without --no-probe measures it")])
        return
    screen.line(f"speed with {machine.threads} thread{'' if machine.threads == 1 else 's'}, measured {machine.date}")
    between_tokens = "" if machine.choice_s is None else f"; {1e6 * machine.choice_s:.0f} us between tokens"
    single_thread = "" if machine.memory_alone is None else f", one thread alone {machine.memory_alone / 1e9:.1f}"
    screen.pairs((
        ("memory", f"reads {machine.memory / 1e9:.1f} GB/s at best, {machine.memory_usual / 1e9:.1f} usually{single_thread}"),
        ("one token", f"{1e6 * machine.token_s:.0f} us, and {1e6 * machine.layer_s:.0f} us per layer, besides reading weights"
                      f"{between_tokens}"),
        *((f"attention, {kv}", f"one token {rate.decode / 1e9:.1f}, deep in a context {(rate.deep or rate.decode) / 1e9:.1f}, a prompt "
           f"{rate.prefill / 1e9:.1f} billion products/s")
          for kv, rate in machine.attention.items())))
    rows = [(kind, f"{rate.decode / 1e9:.1f}", f"{100 * rate.decode / machine.memory:.0f}%", f"{rate.prefill / 1e9:.0f}")
            for kind, rate in machine.kinds.items()]
    screen.table(("weights", "one token, GB/s", "of the memory", "a prompt, billion products/s"), rows, right=(1, 2, 3))
    if machine.disturbed:
        share, names = round(100 * max(machine.disturbed.values())), [name.removeprefix("kind ") for name in machine.disturbed]
        rest = f" and {len(names) - MAX_DISTURBED} more" if len(names) > MAX_DISTURBED else ""
        screen.sentence(f"other programs had up to {share}% of the cores' time when these were measured: "
                        f"{', '.join(names[:MAX_DISTURBED])}{rest}; once they are done, effllm doctor --probe measures them again")
    if roofs.disk is None:
        screen.line("disk: not measured")
        return
    disk = roofs.disk.disk
    read_mode = "direct reads" if disk.direct else "buffered reads, the file system refuses direct ones: some may come from memory"
    screen.sentence(f"disk {disk.device} ({disk.file_system}), {read_mode}, on a file of {format_size(roofs.disk.file_bytes)}, "
                    f"{roofs.disk.date}")
    depths = sorted({read.depth for read in disk.reads})
    sizes = sorted({read.nbytes for read in disk.reads})
    rate = {(read.nbytes, read.depth): read.rate for read in disk.reads}
    screen.table(("reads of", *(f"{depth} at once" for depth in depths)),
                 [(format_size(size), *(f"{rate[size, depth] / 1e9:.2f} GB/s" for depth in depths)) for size in sizes],
                 right=range(1, len(depths) + 1))


def show_measured(screen: Screen, measured: tuple[Measurement, ...]) -> None:
    """Dot products against table lookup, as measured on this machine."""
    if not measured:
        screen.sentence("dot products or table lookup: nothing measured yet; a model that needs it measures, or `effllm doctor --warm`")
        return
    rows = [(str(each.case.bits), str(each.case.group), str(each.case.depth), str(each.case.threads), f"{each.timing.dot / 1e9:.1f}",
             f"{each.timing.lut / 1e9:.1f}", each.kernel, each.reason) for each in measured]
    screen.table(("bits", "group", "inputs", "threads", "dot", "lut", "runs as", "because"), rows, right=(0, 1, 2, 3, 4, 5))
    screen.sentence("dot, lut: billions of weights a second for one token")


def reason(choice: KernelChoice) -> str:
    """Why this kernel runs. For a fallback, and for decoding low-bit weights, also why the other ones do not."""
    shows_declined = choice.fallback or (choice.op == "low-bit matrix" and choice.columns == 1)
    return "; ".join((choice.because, *(f"{name}: {why}" for name, why in (choice.declined if shows_declined else ()))))
