#!/usr/bin/env python3
"""Speed predictions of `effllm plan` against actual runs: prefill and decode, by format, by cache, at depth, for a mixture of experts, and
for weights streamed from disk.

The machine is measured first, as the first `plan` does, and only once: what its memory does later is among the reasons for wrong
predictions. Speeds are medians of a few repetitions, as in `effllm bench`.

    python benchmarks/predictions.py [--repetitions 3] [--threads N] [--only WORD] [--no-results]

Needs 5 GB of memory, and 2.2 GB of disk for random weights (created if absent); takes some five minutes.
"""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from platformdirs import user_cache_path

from benchmark_processes import SHAPE, random_folder
from effllm.runtime.engine import Engine, EngineOptions, open_prepared
from effllm.runtime.measuring.bench import BenchOptions, BenchRow, bench, context_for, prepare_synthetic
from effllm.runtime.planning import forecast, roofs
from effllm.runtime.planning.needed_kernels import kinds_of
from effllm.runtime.prepare import Prepared, prepare
from report import Figure, parser_of, publish

FABLE = Path(__file__).resolve().parent.parent / "models/fable"
INTRO = ("Predicted over measured, so above 1 is promised too much. Rates were measured once, before all. \"A prompt\" has 512 tokens. A "
         "shape has random weights.")


@dataclass(frozen=True)
class Case:
    """A model prepared with options, and what is measured of it."""

    name: str
    prepared: Callable[[EngineOptions], Prepared]
    options: dict[str, str] = field(default_factory=dict)
    tests: BenchOptions = BenchOptions(gen=(32,))


def cases(work: Path) -> Iterator[Case]:
    def shape(name: str, spec: str | None = None) -> Callable[[EngineOptions], Prepared]:
        return lambda options: prepare_synthetic(name, options, spec)

    deep = BenchOptions(gen=(32,), depth=(4096,))
    yield Case("fable, bf16", lambda options: prepare(FABLE, options))
    for spec in (None, "8bit", "4bit", "3bit", "2bit"):
        yield Case(f"1.1B, {spec or 'bf16'}", shape(SHAPE, spec))
    yield Case("Llama 3.2 1B, 4bit", shape("llama3.2-1b", "4bit"), tests=deep)
    yield Case("Llama 3.2 1B, 4bit, --kv 4bit", shape("llama3.2-1b", "4bit"), {"kv": "4bit"}, deep)
    yield Case("OLMoE 7B-A1B, 4bit", shape("olmoe-1b-7b", "4bit"))
    yield Case("1.1B, bf16, --ram 1200M", lambda options: prepare(random_folder(SHAPE, work), options), {"ram": "1200M"},
               BenchOptions(gen=(8,)))


def probe_roofs(wanted: list[roofs.RoofsWanted]) -> None:
    """Measure everything the predictions need, afresh."""
    first = wanted[0]
    every = replace(first, kinds=tuple(dict.fromkeys(kind for each in wanted for kind in each.kinds)), base=True,
                    kv=tuple(dict.fromkeys(kv for each in wanted for kv in each.kv)),
                    file=next((each.file for each in reversed(wanted) if each.file), None))
    for _ in roofs.probe(every, roofs.Roofs(None, None)):
        continue


def open_case(prepared: Prepared) -> Engine:
    *_, engine = open_prepared(lambda: prepared, kinds_of(prepared.config, prepared.store, prepared.container, prepared.options))
    return engine


def format_rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def rows_of(name: str, tests: BenchOptions, options: EngineOptions, work: Path) -> list[BenchRow]:
    """The tests of a case, in their own process: memory left behind by earlier models would count against a budget."""
    (case,) = (case for case in cases(work) if case.name == name)
    with closing(open_case(case.prepared(options))) as engine:
        return [row for row in bench(engine, tests, name) if isinstance(row, BenchRow)]


def main() -> None:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--only", default="", help="cases with this word in their names; nothing is kept")
    parser.add_argument("--work", type=Path, default=user_cache_path("effllm") / "benchmarks")
    options = parser.parse_args()
    if not any(options.only in case.name for case in cases(options.work)):
        parser.error(f"no case has {options.only!r} in its name")
    found = [(case, replace(case.tests, repetitions=options.repetitions)) for case in cases(options.work) if options.only in case.name]
    engine = EngineOptions(device="cpu", threads=options.threads, spec="off")
    settings = [context_for(replace(engine, **case.options), tests) for case, tests in found]
    probe_roofs([forecast.wanted(case.prepared(own)) for (case, _), own in zip(found, settings, strict=True)])
    figures, ratios = [], {"prompts": [], "answers": []}
    for (case, tests), own in zip(found, settings, strict=True):
        with ProcessPoolExecutor(1, get_context("spawn")) as child:
            rows = child.submit(rows_of, case.name, tests, own, options.work).result()
        for row in rows:
            what, ratio = "a prompt" if row.n_prompt else "an answer", row.predicted_ts / row.median_ts
            behind = f" behind {row.n_depth:,} tokens" if row.n_depth else ""
            ratios["prompts" if row.n_prompt else "answers"].append(ratio)
            print(f"{case.name}, {row.test}: {ratio:.2f}", file=sys.stderr, flush=True)
            figures.append(Figure(f"{case.name} {row.test}", case.name,
                                  f"{what}{behind}: {format_rate(row.predicted_ts)} tokens/s, measured "
                                  f"{format_rate(row.median_ts)}", ratio, "x"))
    figures = [Figure(f"median {of}", f"median of {of}", f"from {min(each):.2f} to {max(each):.2f}", median(each), "x")
               for of, each in ratios.items()] + figures
    publish("predictions", "Speeds as predicted, and as measured", INTRO, figures, keep=not options.no_results and not options.only)


if __name__ == "__main__":
    main()
