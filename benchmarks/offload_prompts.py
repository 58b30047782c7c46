"""Prompts of a model streamed from disk and of the same model in memory, alternating: two processes of which one works at a time.

Run by `benchmarks/offload.py --prompts`. A machine's memory and disk change speed by a third within a minute, so both are measured in one
round.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

PROMPTS, CTX, ROUNDS = (128, 512), 640, 5


@dataclass(frozen=True)
class Prompt:
    """Medians over the rounds. `share`: per round, the streamed time over the longer of a pass over the disk and the in-memory time."""

    streamed_s: float
    resident_s: float
    pass_s: float
    share: float


def by_turns(folder: Path, ram: str, threads: int | None, preexec: Callable[[], None] | None) -> dict[int, Prompt]:
    """`preexec` puts the process with the budget into its memory limit."""
    more = ["--threads", str(threads)] if threads else []
    rounds: dict[int, list[tuple[float, float, float]]] = {tokens: [] for tokens in PROMPTS}
    with ExitStack() as stack:
        resident = stack.enter_context(answering([str(folder), *more]))
        streamed = stack.enter_context(answering([str(folder), "--ram", ram, *more], preexec))
        for _ in range(ROUNDS):
            for tokens in PROMPTS:
                rounds[tokens].append((streamed(tokens), resident(tokens), streamed(0)))
    return {tokens: Prompt(*(median(each) for each in zip(*seconds)), median(own / max(there, disk) for own, there, disk in seconds))
            for tokens, seconds in rounds.items()}


@contextmanager
def answering(arguments: list[str], preexec: Callable[[], None] | None = None) -> Iterator[Callable[[int], float]]:
    """A process of this file: maps the tokens of a prompt to its seconds, and 0 to the seconds of a pass over the disk."""
    with subprocess.Popen([sys.executable, __file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                          preexec_fn=preexec) as process:

        def ask(tokens: int) -> float:
            process.stdin.write(f"{tokens}\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()


def main() -> int:
    from effllm.runtime.engine import Engine, open_engine
    from effllm.runtime.prepare import EngineOptions
    from offload import evict, probe

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ram")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    if options.ram:
        evict(sorted(options.folder.glob("*.safetensors")))
    *_, engine = open_engine(options.folder, EngineOptions(device="cpu", ram=options.ram, ctx=CTX, threads=options.threads))
    assert isinstance(engine, Engine) and (engine.prepared.streaming is not None) == bool(options.ram)

    def seconds(tokens: int) -> float:
        engine.reset()
        started = time.perf_counter()
        for _ in engine.prefill([100 + at % 900 for at in range(tokens)]):
            continue
        return time.perf_counter() - started

    for tokens in PROMPTS:  # what is compiled or read once is not the prompt's
        seconds(tokens)
    read = engine.model.pager.disk_nbytes
    engine.forward_logits([7])
    read = engine.model.pager.disk_nbytes - read
    for line in sys.stdin:
        print(json.dumps(seconds(int(line)) if int(line) else read / probe(engine)), flush=True)
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
