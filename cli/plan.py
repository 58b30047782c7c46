"""`effllm plan MODEL`: what a run would take and how fast it would be, from headers alone. The same arithmetic decides the run itself.

The speed comes from measurements of this machine, which the first plan makes (some seconds, kept in the cache folder with their date).
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from .. import DoesNotFit, DownloadFailed, ModelNotFound, UsageError
from .flags import add_command, flag
from .loading import (
    effective_bits,
    final_result,
    find_model_variant,
    load_text_modules,
    requested_bits,
    resolve_draft,
    with_mmproj,
)
from .options import OUTPUT, BitsFlag, Json, Mmproj, Model, Parallel, RunFlags
from .plan_report import BAR, lines, report
from .screen import Screen

if TYPE_CHECKING:
    from pathlib import Path

    from ..runtime.catalog import Absent
    from ..runtime.planning.roofs import Roofs
    from ..runtime.prepare import Prepared
    from ..runtime.pull.plan import PullPlan

EXAMPLES = """examples

  effllm plan fable
  effllm plan tinyllama --ram 2G -c 4096
  effllm plan tinyllama --bits 4 -p 1000 --json
  effllm plan llama3 --ram 6G           # not downloaded yet: planned from metadata on the hub
"""
MARGIN = 13  # columns left of a bar

PromptTokens = Annotated[int | None, flag(OUTPUT, "-p --n-prompt", "N", "prompt length for the predicted time to first token (512)")]
NoProbe = Annotated[bool, flag(OUTPUT, "--no-probe", "", "measure nothing: predict from stored measurements of this machine")]


def register(app: typer.Typer) -> None:
    add_command(app, "plan", "inspect", plan, EXAMPLES)


def plan(context: typer.Context, model: Model, prompt: PromptTokens = None, parallel: Parallel = 1, no_probe: NoProbe = False, *,
         engine: RunFlags, mmproj: Mmproj = None, weights: BitsFlag, json: Json = False) -> None:
    """Predict whether a model fits, what goes where, and how fast it will be."""
    from ..runtime.catalog import Absent
    from ..runtime.encoders import is_encoder
    from ..runtime.planning import forecast

    screen = Screen(context.obj)
    screen.environment.require_stdout()
    if prompt is not None and prompt < 1:
        raise UsageError(f"-p {prompt} is out of range", "1 or more tokens")
    flags = resolve_draft(engine, screen)
    try:
        if is_encoder((ref := find_model_variant(model, screen)).folder):
            from .encoder_info import plan_encoder

            plan_encoder(model, ref, engine, screen, json)
            return
        pull_plan, prepared = None, prepared_for(model, weights, flags, screen, parallel, mmproj)
    except Absent as absent:
        pull_plan = plan_before_pull(absent, weights, flags, screen, parallel)
        prepared = pull_plan.run.prepared
    startup_s = time.process_time()  # what a run's imports and opening take too, without waiting for a cold disk
    if prompt is not None and prepared is not None and prompt >= prepared.placement.ctx:
        raise UsageError(f"-p {prompt} leaves no room for an answer in the context of {prepared.placement.ctx} tokens",
                         "a shorter prompt, or -c for a larger context")
    roofs = machine_roofs(prepared, screen, no_probe, pull_plan and pull_plan.folder)
    prediction, suggestion = replace(forecast.forecast(prepared, roofs, prompt), startup_s=startup_s), forecast.suggest(prepared, roofs)
    for notice in prepared.notices:
        screen.note(notice)
    if json:
        screen.json(report(model, prepared, roofs, prediction, suggestion) | {"pull": pull_plan and pull_plan.to_json()})
    else:
        screen.pairs(lines(model, prepared, roofs, prediction, suggestion, pull_plan, min(BAR, screen.environment.width - MARGIN)))


def prepared_for(model: str, weights: BitsFlag, engine: RunFlags, screen: Screen, parallel: int = 1,
                 mmproj: str | None = None) -> Prepared:
    """The plan of a run of the model, as stored or quantized to `--bits` or a format in its name."""
    from ..runtime.planning.forecast import prepare_quantized
    from ..runtime.prepare import prepare

    ref = with_mmproj(find_model_variant(model, screen), mmproj, screen)
    spec = effective_bits(ref, weights, screen)
    options = engine.options(parallel=parallel, encoder_path=str(ref.whole), mmproj=ref.mmproj)
    text = load_text_modules(ref.folder, options)
    try:
        return prepare(ref.folder, options) if spec is None else prepare_quantized(ref.folder, spec, options)
    finally:
        del text  # held until here: it is part of what a run takes


def plan_before_pull(absent: Absent, weights: BitsFlag, engine: RunFlags, screen: Screen,
                     parallel: int = 1) -> PullPlan:
    """The plan of a model that is not here, from some kilobytes of the hub's. Raises the error itself without a network, ModelNotFound if
    the hub does not provide enough, DoesNotFit."""
    from ..runtime import session  # noqa: F401  (a run has it in memory when it plans)
    from ..runtime.pull.client import Client
    from ..runtime.pull.plan import run_target
    from .pull import note_ignored_bits, plan_with_notice

    variables, reference = screen.environment.variables, absent.reference
    spec = requested_bits(reference.text, reference.variant, weights)
    client = Client(variables)
    if client.offline:
        raise absent
    try:
        target = run_target(reference, variables, spec, "bits" in weights.from_settings and reference.variant is None)
        plan = plan_with_notice(target, client, screen, engine.options(parallel=parallel))
    except DownloadFailed as error:
        screen.note(error.message)
        absent.hint = f"check the network, then {absent.hint}"
        raise absent from error
    note_ignored_bits(target, plan, screen)
    run = plan.run
    if run.prepared is None and run.memory is not None:
        raise DoesNotFit(run.memory.reason, run.memory.hint)
    if run.prepared is None:
        raise ModelNotFound(f"{absent.message}; what it needs cannot be predicted: {run.unknown}", absent.hint)
    if engine.draft is not None or engine.predict_neurons:
        screen.note(f"{reference.text} is not downloaded: this plan leaves out drafts and predictors")
    return plan


def machine_roofs(prepared: Prepared, screen: Screen, no_probe: bool, download_folder: Path | None = None) -> Roofs:
    """The measured rates of this machine; missing ones are measured first. `download_folder`: of a model that is not here
    yet."""
    from ..runtime.planning import forecast, roofs
    from ..runtime.pull.run_estimate import nearest

    measurements = forecast.wanted(prepared)
    stored = roofs.known(measurements if download_folder is None else replace(measurements, file=nearest(download_folder)))
    missing = None if no_probe or "cuda" in prepared.placement.devices else roofs.missing(measurements, stored)
    return stored if missing is None else final_result(roofs.probe(missing, stored), screen, roofs.Roofs)
