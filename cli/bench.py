"""`effllm bench`: tokens per second reading a prompt and writing an answer, as llama-bench measures and names them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .. import UsageError
from .flags import add_command, flag
from .loading import final_result, find_model_variant, quantized_on_load, requested_bits, resolve_draft, show_progress
from .options import OUTPUT, AnyModel, RunFlags, WeightFlags
from .screen import Screen

if TYPE_CHECKING:
    from ..runtime.engine import EngineOptions, Prepared
    from ..runtime.measuring.bench import BenchRow

MEASURE = "measurement"
EXAMPLES = """examples

  effllm bench fable -p 512 -n 64
  effllm bench --synthetic tinyllama-1.1b --bits 4 -d 0,1024 -r 5 -o json

With --spec lookup, --spec mtp or --draft the model decodes greedily instead of reading random tokens.
"""

Synthetic = Annotated[str | None, flag(MEASURE, "--synthetic", "SHAPE",
                                       "use random weights, in the shape of a known name or of a config.json")]
PromptTokens = Annotated[str | None, flag(MEASURE, "-p --n-prompt", "N,…", "prompt length in tokens (512); several, separated by commas")]
GenTokens = Annotated[str | None, flag(MEASURE, "-n --n-gen", "N,…", "tokens to generate (64)")]
Depth = Annotated[str | None, flag(MEASURE, "-d --n-depth", "N,…", "tokens already in the cache (0)")]
Repetitions = Annotated[int | None, flag(MEASURE, "-r --repetitions", "N", "how often to run each test (3)")]
Columns = Annotated[int | None, flag(MEASURE, "--columns", "N", "tokens per decoding pass, as in speculative decoding (1)")]
Output = Annotated[Literal["md", "json", "csv"], flag(OUTPUT, "-o --output", "md|json|csv", "Markdown, JSON or CSV (md)")]
Rows = Annotated[bool, flag(OUTPUT, "--json", "", "print one JSON array, as -o json does")]


SETUP_COLUMNS = ("model", "size", "params", "backend", "threads", "kv")  # describe the test, not its result
OPTIONAL_COLUMNS = ("memory", "read", "of the roof", "predicted")  # dropped in this order in a narrow terminal; --json has all


def register(app: typer.Typer) -> None:
    add_command(app, "bench", "measure", bench, EXAMPLES)


def bench(context: typer.Context, model: AnyModel = None, synthetic: Synthetic = None, prompt: PromptTokens = None, gen: GenTokens = None,
          depth: Depth = None, repetitions: Repetitions = None, columns: Columns = None, *, engine: RunFlags, weights: WeightFlags,
          output: Output = "md", json: Rows = False) -> None:
    """Measure tokens per second: prompt processing (pp) and text generation (tg)."""
    from ..runtime.engine import Engine, open_prepared
    from ..runtime.measuring.bench import BenchOptions, BenchRow, context_for
    from ..runtime.measuring.bench import bench as measure

    screen = Screen(context.obj)
    screen.environment.require_stdout()
    if model is None and synthetic is None:
        raise UsageError("give a model or --synthetic SHAPE", "effllm bench fable")
    if model is not None and synthetic is not None:
        raise UsageError("a model and --synthetic are both given", "give one of them: --synthetic measures random weights of a shape")
    if json and output == "csv":
        raise UsageError("--json and -o csv are different formats", "give one of them")
    values = {"prompt": parse_counts("-p", prompt), "gen": parse_counts("-n", gen), "depth": parse_counts("-d", depth),
              "repetitions": repetitions, "columns": columns}
    engine = resolve_draft(engine, screen)
    options = BenchOptions(**{name: value for name, value in values.items() if value is not None})
    with prepare_bench(model, synthetic, context_for(engine.options(), options), weights, screen) as (prepare, kinds):
        loaded_engine = final_result(open_prepared(prepare, kinds), screen, Engine)
        try:
            rows = list(show_progress(measure(loaded_engine, options, model or f"{synthetic} (random)"), screen, BenchRow))
        finally:
            loaded_engine.close()
    if json or output == "json":
        screen.json([row.to_json() for row in rows])
    elif output == "csv":
        write_csv(rows, screen)
    else:
        write_table(rows, screen)


def parse_counts(name: str, text: str | None) -> tuple[int, ...] | None:
    """Parse comma-separated numbers, as in llama-bench; None if there are none. Raises UsageError."""
    if text is None:
        return None
    numbers = text.split(",")
    if not all(number.strip().isdecimal() for number in numbers):
        raise UsageError(f"{name} {text!r} is not a number of tokens", f"{name} 512, or several: {name} 128,512")
    return tuple(map(int, numbers))


@contextmanager
def prepare_bench(model: str | None, synthetic: str | None, options: EngineOptions, weights: WeightFlags,
                screen: Screen) -> Iterator[tuple[Callable[[], Prepared], Sequence[str]]]:
    """A context that yields a function which plans the model, and the kinds of kernels that it needs."""
    from ..runtime.measuring.bench import prepare_synthetic
    from ..runtime.measuring.synthetic import synthetic_config
    from ..runtime.planning.compile_kernels import check_before_compiling
    from ..runtime.planning.needed_kernels import folder_kinds, format_needs, kernel_kinds, layer_needs
    from ..runtime.prepare import prepare

    if synthetic is None:
        with quantized_on_load(find_model_variant(model, screen), weights, screen, options, needs_tokenizer=False) as ref:
            kinds = folder_kinds(ref.folder, options)
            check_before_compiling(kinds, lambda: prepare(ref.folder, options, dry_run=True))
            yield lambda: prepare(ref.folder, options), kinds
        return
    if weights.keep and "keep" not in weights.from_settings:
        raise UsageError("random weights are not saved", "drop --keep")
    bits = requested_bits(synthetic, None, weights)  # checked before kernels are compiled for it
    needs = format_needs(bits) | layer_needs(synthetic_config(synthetic))
    yield lambda: prepare_synthetic(synthetic, options, bits), kernel_kinds(needs, options)


def write_table(rows: Sequence[BenchRow], screen: Screen) -> None:
    """A Markdown table, with fewer columns in a narrow terminal."""
    from ..offload.size import format_size

    # As in llama-bench, options that differ from the defaults get a column.
    option_columns = {name: [str(getattr(row, field)) for row in rows]
             for name, field, default in (("ngl", "n_gpu_layers", 0), ("columns", "columns", 1))
             if any(getattr(row, field) != default for row in rows)}
    cells = [("model", "size", "params", "backend", "threads", *option_columns, "kv", "test", "t/s", "predicted", "read", "of the roof",
              "memory")]
    for index, row in enumerate(rows):
        cells.append((row.model_type, format_size(row.model_size), f"{row.model_n_params / 1e6:.2f} M", row.backends, str(row.n_threads),
                      *(column[index] for column in option_columns.values()), row.type_k, row.test,
                      f"{row.avg_ts:.2f} ± {row.stddev_ts:.2f}",
                      "" if row.predicted_ts is None else f"{row.predicted_ts:.2f}",
                      f"{format_size(round(row.read_bandwidth))}/s" if row.n_gen else "",
                      f"{100 * row.roof_fraction:.0f}%" if row.n_gen else "", format_size(row.peak_rss_bytes)))
    lines = markdown_lines(cells)
    if screen.report_width is not None and len(lines[0]) > screen.report_width:  # constant columns become a sentence above the table
        constant = [index for index, heading in enumerate(cells[0])
                    if heading in (*SETUP_COLUMNS, *option_columns) and len({line[index] for line in cells[1:]}) == 1]
        screen.sentence(" · ".join(f"{cells[0][index]} {cells[1][index]}" for index in constant).removeprefix("model "))
        screen.line()  # Markdown needs an empty line before a table
        cells = [tuple(cell for index, cell in enumerate(line) if index not in constant) for line in cells]
        lines = markdown_lines(cells)
        for heading in OPTIONAL_COLUMNS:
            if len(lines[0]) > screen.report_width:
                dropped = cells[0].index(heading)
                cells = [line[:dropped] + line[dropped + 1 :] for line in cells]
                lines = markdown_lines(cells)
    for line in lines:
        screen.line(line)


def markdown_lines(cells: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table with aligned columns; the first of `cells` are the headings."""
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = ["| " + " | ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)) + " |" for line in cells]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def write_csv(rows: Sequence[BenchRow], screen: Screen) -> None:
    import csv
    import io

    table = io.StringIO()
    writer = csv.DictWriter(table, fieldnames=list(rows[0].to_json()), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: " ".join(map(str, value)) if isinstance(value, tuple) else value for name, value in row.to_json().items()})
    for line in table.getvalue().splitlines():
        screen.line(line)
