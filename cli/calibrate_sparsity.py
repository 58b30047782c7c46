"""`effllm calibrate-sparsity MODEL`: the share of neurons that a text activates, and what sparse paging would read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import UsageError
from .eval import read_text, source_name
from .flags import add_command, flag
from .loading import final_result, find_model, open_with_progress
from .options import OUTPUT, TEXT, Json, Model, Sample, Threads
from .screen import Screen

if TYPE_CHECKING:
    from ..runtime.sparse.sparsity_file import Sparsity

EXAMPLES = """examples

  effllm calibrate-sparsity ./neurons
  effllm calibrate-sparsity ./my-relu-model --text story.txt --trace story.npz --json
  effllm calibrate-sparsity ./neurons --predictor 64
"""
Tokens = Annotated[int | None, flag(TEXT, "--tokens", "N", "how many of its tokens to use (2048)")]
Trace = Annotated[str | None, flag(OUTPUT, "--trace", "FILE", "write which neurons each token activates to an .npz file")]
Predictor = Annotated[int | None, flag(OUTPUT, "--predictor", "RANK", "train predictors of this rank, for run --predict-neurons (none)")]


def register(app: typer.Typer) -> None:
    add_command(app, "calibrate-sparsity", "measure", calibrate_sparsity, EXAMPLES)


def calibrate_sparsity(context: typer.Context, model: Model, text: Sample = None, tokens: Tokens = None, trace: Trace = None,
                       predictor: Predictor = None, threads: Threads = None, json: Json = False) -> None:
    """Record which neurons of a ReLU model a text activates, so that plan can predict what it reads from the disk."""
    from ..runtime.calibrate import built_in_text
    from ..runtime.library.external_models import require_place_beside
    from ..runtime.prepare import EngineOptions
    from ..runtime.sparse import activation_predictors, sparsity, sparsity_file
    from ..runtime.sparse.neuron_bundles import neurons_per_read
    from ..runtime.tokenizer import Tokenizer

    screen = Screen(context.obj)
    if tokens is not None and tokens < sparsity.LEAST:
        raise UsageError(f"--tokens {tokens} is too few", f"use at least {sparsity.LEAST}; {sparsity.TOKENS} are enough")
    if predictor is not None and predictor < 1:
        raise UsageError(f"--predictor {predictor} is not a rank", f"try {activation_predictors.RANK}")
    content = built_in_text() if text is None else read_text(text, screen)
    ref = find_model(model, screen)
    require_place_beside(ref.folder, screen.environment.variables)
    sparsity.require_sparse_folder(ref.folder)
    if trace is not None:
        sparsity.require_trace_path(Path(trace))
    engine = open_with_progress(ref.folder, EngineOptions(device="cpu", threads=threads, kv="32bit", ctx=None), screen)
    try:
        ids = Tokenizer.load(ref.folder, engine.config).encode(content)[: tokens or sparsity.TOKENS]
        inputs: list | None = None if predictor is None else []
        activations = final_result(sparsity.record(engine, ids, inputs), screen, sparsity.Trace)
        group_size = neurons_per_read(engine.model.tensors, engine.config)
    finally:
        engine.close()
    if trace is not None:
        activations.save(Path(trace))
    summary = sparsity.summarize(activations, group_size)
    if predictor is not None:
        trained, rates = final_result(activation_predictors.train(activations, inputs, predictor), screen, tuple)
        trained.save(ref.folder)
        summary = replace(summary, predictor=rates)
    file = sparsity_file.save(summary, ref.folder)
    if json:
        screen.json(summary.to_json() | {"file": str(file), "neurons": activations.neurons, "together": group_size})
    else:
        print_report(summary, file, "the sample" if text is None else source_name(text), screen)


def print_report(summary: Sparsity, file: Path, source: str, screen: Screen) -> None:
    mean_active = sum(summary.active) / len(summary.active)
    screen.pairs((("recorded on", f"{summary.tokens} tokens of {source}"), ("kept in", str(file)),
                  ("active", f"{mean_active:.1%} of the neurons; by layer {', '.join(f'{share:.1%}' for share in summary.active)}"),
                  *predictor_accuracy(summary)))
    screen.table(("in memory", "read per token"), [(f"{share:.0%} of up and down", f"{summary.missed_at(share):.2%} of them")
                                                   for share in sorted(summary.missed)], right=(1,))


def predictor_accuracy(summary: Sparsity) -> list[tuple[str, str]]:
    """The accuracy of the predictors on held-out text."""
    rates = summary.predictor
    if rates is None:
        return []
    return [("predicted", f"rank {rates.rank} misses {rates.missed:.1%} of the active neurons and predicts "
                          f"{sum(rates.named) / len(rates.named):.1%} of all as active; recall by layer: "
                          f"{', '.join(f'{recall:.0%}' for recall in rates.recall)}")]
