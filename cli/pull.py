"""`effllm pull MODEL`: the plan, then the download; and the same offer for `run` and `chat` of a missing model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import DoesNotFit, ModelNotFound, UsageError, typed
from .flags import add_command, flag, is_typed
from .loading import final_result
from .number_format import margin, rounded
from .options import MEMORY, OUTPUT, AbsentModel, Json, Yes
from .screen import Screen
from .settings import origin

if TYPE_CHECKING:
    from ..runtime.catalog import Absent, CatalogEntry, ModelRef
    from ..runtime.library.model_name import Reference
    from ..runtime.prepare import EngineOptions
    from ..runtime.pull.client import Client
    from ..runtime.pull.plan import PullPlan, PullTarget
    from ..runtime.pull.pull import Pulled

NETWORK = "network"
NAME_WIDTH = 10  # columns of the names of a plan's lines
EXAMPLES = """examples

  effllm pull tinyllama
  effllm pull qwen3-4b --bits 4       # quantized as it arrives, one file of the original at a time
  effllm pull org/repo@v1.0 --dry-run
  effllm pull org/repo:model.Q4_K_M.gguf
  effllm pull org/repo:Q4_K_M         # the one GGUF file of that precision

Files go into the Hugging Face cache (HF_HUB_CACHE, HF_HOME), where other tools find them. What --bits quantizes goes into effllm's own
folder. A stopped pull continues where it stopped. HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE and HTTPS_PROXY are honoured.
"""

Bits = Annotated[int | None, flag(MEMORY, "--bits", "8|6|5|4|3|2", "quantize the weights as they arrive, and keep only those")]
Keep = Annotated[bool, flag(MEMORY, "--keep", "", "with --bits: also keep the published weights")]
DryRun = Annotated[bool, flag(OUTPUT, "--dry-run", "", "show what would be downloaded, and download nothing")]
Offline = Annotated[bool, flag(NETWORK, "--offline", "", "use no network: work with downloaded files, or fail")]


def register(app: typer.Typer) -> None:
    add_command(app, "pull", "get and manage models", pull, EXAMPLES)


def pull(context: typer.Context, model: AbsentModel, bits: Bits = None, keep: Keep = False, dry_run: DryRun = False,
         offline: Offline = False, yes: Yes = False, json: Json = False) -> None:
    """Download a model; with --bits, quantize it as it arrives."""
    from ..runtime.library.model_name import parse_reference
    from ..runtime.pull.client import Client
    from ..runtime.pull.plan import pull_target

    screen = Screen(context.obj)
    variables = screen.environment.variables
    reference = parse_reference(model, variables)
    if reference.path is not None:
        raise UsageError(f"{model} is a path, but pull downloads from the hub", "give an alias or org/repo: effllm list --all")
    if reference.program is not None:
        raise UsageError(f"{model} belongs to another program, but pull downloads from the hub",
                         f"ollama pull {typed(reference.of_program)}" if reference.program == "ollama" else "give an alias or org/repo")
    from_settings = bits is not None and not is_typed(context, "bits")
    if from_settings and reference.file is not None and reference.variant is None:
        screen.note(f"{model}: a single file is pulled without quantizing: bits of {origin(screen.environment, 'bits')} is ignored")
    bits = None if from_settings and (reference.variant or reference.file) else bits  # a format or file in the name overrides settings
    if bits is None and not keep and (local := find_local_alias(reference, variables)) is not None:
        print_local_alias(local, screen, json)
        return
    keep = keep and (is_typed(context, "keep") or bits is not None or reference.variant is not None)
    quantize_to = requested_format(reference.variant, bits, keep, model)
    target = replace(pull_target(reference, variables, quantize_to, keep), bits_from_settings=from_settings)
    client = Client(variables, offline)
    if client.offline and (local := find_local(target, screen)) is not None:
        print_result(local, None, None, screen, json)
        return
    plan = plan_with_notice(target, client, screen)
    note_ignored_bits(target, plan, screen)
    if not json:
        show_plan(with_speed(plan, screen, may_measure=not dry_run), screen)
    if dry_run:
        if json:
            screen.json(plan.to_json())
        return
    confirm_memory(plan, screen, yes)
    pulled = download(plan, client, screen)
    print_result(pulled.folder, pulled, plan, screen, json)


def find_local_alias(reference: Reference, variables: Mapping[str, str]) -> CatalogEntry | None:
    """The alias of a model in a local folder, which needs no download."""
    from ..runtime.catalog import catalog, find_entry

    plain = reference.file is None and reference.variant is None and reference.revision is None
    entry = find_entry(catalog(variables), reference.name) if plain else None
    return entry if entry is not None and entry.repo is None else None


def print_local_alias(entry: CatalogEntry, screen: Screen, json: bool) -> None:
    from ..runtime.catalog import resolve

    folder = resolve(entry.alias, screen.environment.variables).folder
    if json:
        screen.json({"folder": str(folder), "bytes_loaded": 0, "seconds": 0.0, "plan": None})
    else:
        origin_text = f"it is {entry.library or f'at {folder}'}" if entry.own else "it comes with effllm"
        screen.note(f"{entry.alias} needs no download: {origin_text}; effllm run {entry.alias}")


def requested_format(variant: str | None, bits: int | None, keep: bool, model: str) -> str | None:
    """The format to quantize to, from the name or --bits; None for none. Raises UsageError if they differ, and for --keep without one."""
    if keep and bits is None and variant is None:
        raise UsageError("--keep keeps the published weights beside what --bits makes", f"effllm pull {typed(model)} --bits 4 --keep")
    from_bits = f"{bits}bit" if bits is not None else None
    if variant and from_bits and variant != from_bits:
        raise UsageError(f"{model} and --bits {bits} disagree", "give one of them")
    return variant or from_bits


def find_local(target: PullTarget, screen: Screen) -> Path | None:
    """The folder of a model without using the network; None if something is missing. If all published weights are local, they are quantized
    to --bits."""
    from ..runtime.catalog import resolve

    reference, variables = target.reference, screen.environment.variables
    try:
        if target.bits is None or target.keep:
            ref = resolve(f"{reference.base}:{reference.file}" if reference.file else reference.base, variables)
            if ref.notice:  # only another format is here
                return None
        if target.bits is not None:
            ref = resolve(f"{reference.base}:{target.bits}", variables)
    except ModelNotFound:
        return None
    return ref.folder if ref.variant is None else quantize_cached(ref, screen)


def quantize_cached(ref: ModelRef, screen: Screen) -> Path:
    """The cached model quantized to the format in its name, stored where a pull stores it."""
    from ..runtime.conversion import on_load
    from ..runtime.convert import Converted

    request = on_load.Request(ref, ref.variant, screen.environment.models_folder, keep=True)
    request.folder.parent.mkdir(parents=True, exist_ok=True)
    return final_result(on_load.quantize_on_load(request, request.folder), screen, Converted).folder


def plan_with_notice(target: PullTarget, client: Client, screen: Screen, options: EngineOptions | None = None) -> PullPlan:
    """`plan_pull`, with a status line until the hub has answered. Raises what `plan_pull` raises."""
    from ..runtime.pull.plan import plan_pull

    with nullcontext() if client.offline else screen.waiting(f"asking {client.host} for {target.reference.base}"):
        return plan_pull(target, client, screen.environment.variables, options)


def download(plan: PullPlan, client: Client, screen: Screen) -> Pulled:
    """Run the plan with progress. After Ctrl-C a note says how to continue."""
    from ..runtime.pull.pull import Pulled, pull_model

    try:
        return final_result(pull_model(plan, client, screen.environment.variables), screen, Pulled)
    except KeyboardInterrupt:
        command = f"effllm pull {plan.target.reference.text}{reproducing_flags(plan)}"
        screen.note(f"stopped; the partial download is kept. {command} continues from here")
        raise


def with_speed(plan: PullPlan, screen: Screen, may_measure: bool = True) -> PullPlan:
    """The plan with a predicted speed, for terminals only. A machine that was not measured yet is measured now, in some seconds; without
    `may_measure`, or if kernels would have to be compiled for that, the speed is estimated from memory bandwidth."""
    from ..runtime.planning import roofs
    from ..runtime.pull.run_estimate import missing_measurement, rough_estimate, with_roofs

    if not screen.environment.is_interactive:
        return plan
    measurement = missing_measurement(plan.run) if may_measure else None
    if measurement is None:
        return replace(plan, run=rough_estimate(plan.run))
    screen.note("measuring this machine once, to say how fast the model will be")
    measured_roofs = final_result(roofs.probe(measurement, plan.run.known), screen, roofs.Roofs)
    return replace(plan, run=with_roofs(plan.run, measured_roofs))


def reproducing_flags(plan: PullPlan) -> str:
    """The flags that reproduce the plan."""
    target = plan.target
    bits = f" --bits {target.bits.removesuffix('bit')}" if target.bits and not target.reference.variant else ""
    return bits + (" --keep" if target.keep else "")


def show_plan(plan: PullPlan, screen: Screen) -> None:
    """Show the plan on stderr; stdout is for the answer of `run` and for --json."""
    from ..offload.size import format_size
    from ..runtime.hub import shown_licence
    from .plan_report import BAR, tiers

    repository, target, run = plan.repository, plan.target, plan.run
    if repository.repo != repository.requested_name:
        screen.note(f"{repository.requested_name} is called {repository.repo} now")
    alternative = f"; about the same size without a gate: {plan.alternative}" if plan.alternative else ""
    gate = f", gated: your token must have access{alternative}" if repository.gated else ""
    format_text = f" at {target.bits}" if target.bits else ""
    lines = [("model", f"{repository.repo} at {repository.commit[:12]}" + (f" ({target.entry.alias})" if target.entry else "")),
             ("licence", f"{shown_licence(plan.licence, 'not stated')}{gate}"),
             ("download", remaining_bytes(plan)),
             ("kept", f"{format_size(plan.kept_bytes)}{format_text} in {plan.folder}"),
             ("disk", f"{format_size(plan.disk_bytes)} needed at most, {format_size(plan.disk_free)} free")]
    if target.reference.file is not None:
        lines.insert(1, ("file", plan.files[0].name))
    if plan.projector is not None:
        lines.append(("images", f"{format_size(plan.projector.size)} of the download is its projector, {plan.projector.name}"))
    if target.on_load:
        lines.append(("on load", f"quantized to {target.on_load}"))
    if plan.smaller is not None:
        bits, nbytes = plan.smaller
        lines.append(("smaller", f"--bits {bits} keeps {format_size(nbytes)} of it"))
    if run.prepared is not None:
        lines += tiers(run.prepared, run.forecast.work, run.known, min(BAR, screen.environment.width - NAME_WIDTH), "read")
    elif run.memory is not None:
        lines.append(("memory", f"does not fit now: {run.memory.reason}"))
    if run.memory is None and run.unknown:
        lines.append(("run", f"memory and speed are not known: {run.unknown}"))
    elif run.tokens_per_s is not None:
        lines.append(("speed", f"about {rounded(run.tokens_per_s)} tokens/s ({margin(run.error)})"))
    elif run.rough is not None:
        lines.append(("speed", f"about {rounded(run.rough.tokens_per_s, 2)} tokens/s ({margin(run.rough.error)}) from memory bandwidth "
                      f"alone: {run.unknown}"))
    elif run.unknown:
        lines.append(("speed", f"not known: {run.unknown}"))
    if plan.lacks_tokenizer:
        lines.append(("tokenizer", "none: there is no tokenizer.json, so it will not run until one is put beside the weights"))
    for name, text in lines:
        screen.note(f"{name:<{NAME_WIDTH}}{text}", NAME_WIDTH)


def remaining_bytes(plan: PullPlan) -> str:
    """The bytes still to download as text, with the total if some are here."""
    from ..offload.size import format_size, plural

    files = plural(len(plan.files), "file")
    if plan.is_done and plan.target.bits is not None:
        return "nothing: the result exists already"
    if not plan.held_bytes:
        return f"{format_size(plan.download_bytes)} in {files}"
    if not plan.download_bytes:
        return f"nothing: {format_size(plan.held_bytes)} in {files} are downloaded already"
    return f"{format_size(plan.download_bytes)} of {format_size(plan.total_bytes)} in {files}, the others are downloaded already"


def confirm_memory(plan: PullPlan, screen: Screen, yes: bool, override_hint: str = "-y downloads it anyway") -> None:
    """Ask before downloading a model that could not run here. `override_hint`: how to download it without being asked. Raises DoesNotFit
    after a no, or if nobody can be asked."""
    memory = plan.run.memory
    if memory is None or memory.fits or yes:
        return
    smaller = "" if plan.target.bits or plan.target.reference.file else f"effllm pull {plan.target.reference.text} --bits 4 may fit; "
    if not screen.environment.is_interactive:
        raise DoesNotFit(f"{plan.target.reference.text} would not run here: {memory.reason}", smaller + override_hint)
    if not screen.confirm("It would not run on this machine now. Download it anyway?"):
        raise DoesNotFit("nothing was downloaded", smaller + override_hint)


def print_result(folder: object, pulled: Pulled | None, plan: PullPlan | None, screen: Screen, json: bool) -> None:
    from ..offload.size import format_size

    if json:
        screen.json({"folder": str(folder), "bytes_loaded": pulled.downloaded_nbytes if pulled else 0,
                     "seconds": pulled.seconds if pulled else 0.0, "plan": plan.to_json() if plan else None})
    elif pulled is None or pulled.was_complete:
        screen.note(f"{folder}: everything is downloaded already")
    else:
        loaded = f"{format_size(pulled.downloaded_nbytes)} downloaded and checked" if pulled.downloaded_nbytes else "made from local files"
        screen.note(f"{folder}: {loaded}; effllm run {plan.target.reference.text}"
                    + (f":{plan.target.bits}" if plan.target.bits and not plan.target.reference.variant else ""))


def note_ignored_bits(target: PullTarget, plan: PullPlan, screen: Screen) -> None:
    """Note that the default bits of the settings are ignored, if the plan ignores them."""
    if (target.bits or target.on_load) and not (plan.target.bits or plan.target.on_load):
        quantization = plan.quantized_as or "by another tool"
        screen.note_once(f"{target.reference.text} is quantized already ({quantization}): "
                         f"bits of {origin(screen.environment, 'bits')} is ignored")


def offer_download(absent: Absent, bits: str | None, from_settings: bool, screen: Screen, yes: bool, options: EngineOptions) -> ModelRef:
    """Download a missing model if the user agrees, and return it; else `absent` is raised.

    bits: the format to quantize to; from_settings: it is a default, ignored for a model that is quantized already.
    yes: agree without being asked, unless the model could not run here.
    options: of the run that follows.
    """
    from ..runtime.catalog import resolve
    from ..runtime.pull.client import Client
    from ..runtime.pull.plan import run_target

    variables = screen.environment.variables
    client = Client(variables)
    if not yes and not screen.environment.is_interactive:
        raise absent
    target = run_target(absent.reference, variables, bits, from_settings)
    plan = plan_with_notice(target, client, screen, options)
    note_ignored_bits(target, plan, screen)
    show_plan(with_speed(plan, screen), screen)
    if plan.run.memory is not None and not plan.run.memory.fits:
        confirm_memory(plan, screen, False, f"effllm pull {plan.target.reference.text}{reproducing_flags(plan)} -y downloads it anyway")
    elif not yes and not screen.confirm("Download it?"):
        raise absent
    download(plan, client, screen)
    return resolve(absent.reference.text, variables)
