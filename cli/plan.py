"""`effllm plan MODEL`: what a run would take and how fast it would be, from headers alone. The same arithmetic decides the run itself.

The speed comes from measurements of this machine, which the first plan makes (some seconds, kept in the cache folder with their date).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from .. import DoesNotFit, DownloadFailed, ModelNotFound, UsageError
from .flags import add_command, flag
from .loading import bits_for, find_any, follow, last, load_text_modules, requested_bits, with_draft, with_mmproj
from .number_format import margin
from .options import OUTPUT, BitsFlag, Json, Mmproj, Model, Parallel, RunFlags
from .screen import Screen

if TYPE_CHECKING:
    from pathlib import Path

    from ..offload.placement import Placement
    from ..offload.predict import Prediction, Work
    from ..runtime.catalog import Absent
    from ..runtime.planning.forecast import Forecast, Suggestion
    from ..runtime.planning.roofs import Roofs
    from ..runtime.prepare import Prepared
    from ..runtime.pull.plan import PullPlan

EXAMPLES = """examples

  effllm plan fable
  effllm plan tinyllama --ram 2G -c 4096
  effllm plan tinyllama --bits 4 -p 1000 --json
  effllm plan llama3 --ram 6G           # not downloaded yet: planned from metadata on the hub
"""
BAR, MARGIN, MOST_RUNS = 40, 13, 4
WEIGHTS, CACHE, OTHER, FREE = "█", "▓", "▒", "·"

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
    flags = with_draft(engine, screen)
    try:
        if is_encoder((found := find_any(model, screen)).folder):
            from .encoder_info import plan_encoder

            plan_encoder(model, found, engine, screen, json)
            return
        coming, prepared = None, prepared_for(model, weights, flags, screen, parallel, mmproj)
    except Absent as absent:
        coming = plan_before_pull(absent, weights, flags, screen, parallel)
        prepared = coming.run.prepared
    begun_s = time.process_time()  # a run has imported and opened the same by then; waiting for a cold disk is not included
    if prompt is not None and prepared is not None and prompt >= prepared.placement.ctx:
        raise UsageError(f"-p {prompt} leaves no room for an answer in the context of {prepared.placement.ctx} tokens",
                         "a shorter prompt, or -c for a larger context")
    known = machine_roofs(prepared, screen, no_probe, coming and coming.folder)
    found, better = replace(forecast.forecast(prepared, known, prompt), begun_s=begun_s), forecast.suggest(prepared, known)
    for notice in prepared.notices:
        screen.note(notice)
    if json:
        screen.json(report(model, prepared, known, found, better) | {"pull": coming and coming.to_json()})
    else:
        screen.pairs(lines(model, prepared, known, found, better, coming, min(BAR, screen.environment.width - MARGIN)))


def prepared_for(model: str, weights: BitsFlag, engine: RunFlags, screen: Screen, parallel: int = 1,
                 mmproj: str | None = None) -> Prepared:
    """The plan of the model as stored, or as quantized by `--bits` or a format in its name, as a run would do it."""
    from ..runtime.planning.forecast import prepare_quantized
    from ..runtime.prepare import prepare

    ref = with_mmproj(find_any(model, screen), mmproj, screen)
    spec = bits_for(ref, weights, screen)
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
    from .pull import plan_with_notice, say_left_out

    variables, reference = screen.environment.variables, absent.reference
    spec = requested_bits(reference.text, reference.variant, weights)
    client = Client(variables)
    if client.offline:
        raise absent
    try:
        wish = run_target(reference, variables, spec, "bits" in weights.settled and reference.variant is None)
        plan = plan_with_notice(wish, client, screen, engine.options(parallel=parallel))
    except DownloadFailed as error:
        screen.note(error.message)
        absent.hint = f"check the network, then {absent.hint}"
        raise absent from error
    say_left_out(wish, plan, screen)
    run = plan.run
    if run.prepared is None and run.memory is not None:
        raise DoesNotFit(run.memory.reason, run.memory.hint)
    if run.prepared is None:
        raise ModelNotFound(f"{absent.message}; what it needs cannot be predicted: {run.unknown}", absent.hint)
    if engine.draft is not None or engine.predict_neurons:
        screen.note(f"{reference.text} is not downloaded: this plan leaves out drafts and predictors")
    return plan


def machine_roofs(prepared: Prepared, screen: Screen, no_probe: bool, coming: Path | None = None) -> Roofs:
    """The measured rates of this machine; missing ones are measured first. `coming`: where a model will be that is not here."""
    from ..runtime.planning import forecast, roofs
    from ..runtime.pull.run_estimate import nearest

    wanted = forecast.wanted(prepared)
    known = roofs.known(wanted if coming is None else replace(wanted, file=nearest(coming)))
    lacking = None if no_probe or "cuda" in prepared.placement.devices else roofs.missing(wanted, known)
    return known if lacking is None else last(follow(roofs.probe(lacking, known), screen, roofs.Roofs))


def report(model: str, prepared: Prepared, known: Roofs, found: Forecast, better: Suggestion | None) -> dict[str, object]:
    """What `--json` prints. Keys stay; bytes, seconds, tokens a second. Of a tier, `weights_bytes` are those of its memory, or what a token
    reads, and `tensor_bytes` those of the model's tensors that lie there: over all tiers, all of them. Where pages of the
    cache are picked, those of a token from the disk are the most that it could read."""
    from ..runtime.adapters.dora import resolve_lengths_s
    from ..runtime.planning.chosen_kernels import chosen_kernels
    from ..runtime.weights.weight_tiers import weight_tiers

    placement, work = prepared.placement, found.work

    def told(prediction: Prediction | None, tokens: int = 1) -> dict[str, object] | None:
        return prediction and {"seconds": prediction.seconds, "tokens_per_s": tokens * prediction.tokens_per_s, "error": prediction.error,
                               "limit": prediction.limit, "disk_s": prediction.disk_s, "memory_s": prediction.memory_s,
                               "processor_s": prediction.processor_s}

    residency, drafting, paged = placement.residency, prepared.speculation, placement.expert_slots is not None and prepared.streaming
    held, lies = placement.pinned_bytes, weight_tiers(prepared)
    return {
        "model": model, "ctx": placement.ctx, "parallel": prepared.options.parallel, "kv": prepared.options.kv,
        "devices": devices(placement),
        "weights_bytes": placement.weights_bytes, "kv_bytes": placement.kv_bytes, "workspace_bytes": placement.workspace_bytes,
        "baseline_bytes": placement.baseline_bytes, "total_bytes": placement.total_bytes, "ram_bytes": placement.budget.ram,
        "vram_bytes": placement.budget.vram, "notes": list(placement.notes), "layers": list(placement.tiers),
        "copied_from_tokens": placement.copied_from,
        "experts": paged.to_json() if paged else None,
        "tiers": {"memory": {"weights_bytes": paged.held_nbytes if paged else held, "tensor_bytes": lies.memory,
                             "always_bytes": lies.always, "ring_bytes": residency.ring_nbytes if residency else 0,
                             "kv_bytes": placement.host_kv_bytes,
                             "other_bytes": placement.workspace_bytes + placement.baseline_bytes},
                  "disk": {"weights_bytes": paged.away_nbytes if paged else placement.streamed_bytes, "tensor_bytes": lies.disk,
                           "neuron_bytes": work.neurons, "kv_bytes": placement.kv_disk_bytes},
                  "gpu": {"total_bytes": placement.vram_bytes, "weights_bytes": placement.gpu.weights_bytes, "tensor_bytes": lies.gpu,
                          "kv_bytes": placement.gpu.kv_bytes, "other_bytes": placement.gpu.workspace_bytes,
                          "copied_layers_bytes": placement.gpu.buffers_bytes, "head_bytes": placement.gpu.head_bytes}},
        "per_token": {"weights_bytes": work.bytes_per_token, "disk_bytes": work.streamed + round(work.missed), "kv_bytes_at_full_context":
                      work.kv_at(placement.ctx), "kv_disk_bytes_at_full_context": work.kv_disk_bytes(placement.ctx)},
        "prediction": {"start": told(found.start), "full_context": told(found.full), "prompt": told(found.prompt, found.prompt_tokens),
                       "prompt_tokens": found.prompt_tokens, "load_s": found.load_s, "program_s": found.begun_s,
                       "unknown": found.reason or None},
        "kernels": [each.to_json() for each in chosen_kernels(prepared)],
        "speculation": {"lookup": drafting.lookup, "draft": prepared.options.draft if drafting.draft else None,
                        "draft_bytes": drafting.draft_nbytes, "draft_bits": drafting.draft_bits or None, "mtp": drafting.mtp,
                        "mtp_bytes": drafting.mtp_nbytes},
        "adapters": {"names": list(prepared.adapters.names), "matrices": len(prepared.adapters.weights), "rank": prepared.adapters.rank,
                     "bytes": prepared.adapters.nbytes, "measuring_s": resolve_lengths_s(prepared)},
        "media_bytes": sum(prepared.media_nbytes.values()),
        "suggestion": better and {"flag": better.flag, "tokens_per_s": better.tokens_per_s, "gain": better.gain,
                                  "full_context": better.full},
        "machine": known.machine and {"date": known.machine.date, "memory_bytes_per_s": known.machine.memory},
        "disk": known.disk and {"date": known.disk.date, "bytes_per_s": known.disk.disk.stream_rate, "direct": known.disk.disk.direct},
    }


def devices(placement: Placement) -> dict[str, int]:
    return {device: placement.devices.count(device) for device in dict.fromkeys(placement.devices)}


def lines(model: str, prepared: Prepared, known: Roofs, found: Forecast, better: Suggestion | None,
          coming: PullPlan | None = None, width: int = BAR) -> list[tuple[str, str]]:
    """The report as text, with bars of `width`."""
    from ..offload.size import format_size
    from ..runtime.planning import forecast

    placement, work = prepared.placement, found.work
    read = work.streamed + round(work.missed)
    said = [("model", f"{model} ({prepared.config.family})")]
    if coming is not None:
        from ..runtime.hub import shown_licence
        from .pull import suffix

        said.append(("not here", f"effllm pull {coming.wish.reference.text}{suffix(coming)} downloads {format_size(coming.to_load)}, keeps "
                                 f"{format_size(coming.kept_bytes)}; licence {shown_licence(coming.licence, 'not stated')}"
                                 + (", gated" if coming.repository.gated else "")))
    said += [("fits", verdict(prepared, found)), *tiers(prepared, work, known, width)]
    said += [("per token", f"{format_size(work.bytes_per_token)} of weights"
              + (f", {format_size(read)} of them from the disk" if read else "")
              + f", up to {format_size(work.kv_at(placement.ctx))} of cache{paged_cache(prepared, work)}"),
             *products(prepared), *speeds(found)]
    if prepared.adapters.names:
        from ..runtime.adapters.dora import resolve_lengths_s

        own = prepared.adapters
        rows = f"; computing row norms for DoRA takes about {seconds(resolve_lengths_s(prepared))} at each start" if own.lengths else ""
        said.append(("adapters", f"{', '.join(own.names)}: beside {len(own.weights)} matrices, rank {own.rank}, {format_size(own.nbytes)}"
                                 f"{rows}"))
    said += [(modality.plural, f"supported; the {modality.tower} takes {format_size(nbytes)}, counted as program memory")
             for modality, nbytes in prepared.media_nbytes.items()]
    if prepared.speculation:
        said.append(("speculation", drafts(prepared)))
    if better is not None:
        said.append(("faster", f"{better.flag}: {better.gain:.1f} times as fast"
                     f" ({rate(better.tokens_per_s)} tokens/s{' with a full context' if better.full else ''})"))
    if known.machine is not None:
        disk = f", disk {known.disk.disk.stream_rate / 1e9:.2f} GB/s ({known.disk.date})" if known.disk else ""
        said.append(("measured", f"memory {known.machine.memory / 1e9:.1f} GB/s, kernels ({known.machine.date}){disk}"))
        if others := known.machine.disturbed_of(forecast.wanted(prepared)):
            said.append(("", f"other programs had up to {round(100 * max(others.values()))}% of the cores' time then: the next plan that "
                             "finds them free measures again"))
    return said


def verdict(prepared: Prepared, found: Forecast) -> str:
    """The plan in one sentence."""
    placement = prepared.placement
    held = " and ".join(TIERS[tier] for tier in ("gpu", "memory") if tier in placement.tiers) or TIERS["memory"]
    away = placement.streamed_bytes or placement.kv_disk_bytes or "disk" in placement.tiers or prepared.streaming
    said = f"partly: what does not fit {held} is read from the disk" if away else f"yes, all of it {held}"
    if found.start is None:
        return said
    pace = next(words for least, words in PACES if found.start.tokens_per_s >= least)
    return f"{said}; answers come {pace}"


def tiers(prepared: Prepared, work: Work, known: Roofs, width: int = BAR, disk: str = "disk") -> list[tuple[str, str]]:
    """What is where, in bars of `width`; `disk` names the line of what is read from there."""
    from ..offload.size import format_size
    from ..runtime.planning.forecast import describe_neurons

    placement = prepared.placement
    residency, budget = placement.residency, placement.budget
    other = placement.workspace_bytes + placement.baseline_bytes
    paged = placement.expert_slots is not None and prepared.streaming
    each = f" for each of {prepared.options.parallel} answers" if prepared.options.parallel > 1 else ""
    held = paged.held_nbytes if paged else placement.pinned_bytes + (residency.ring_nbytes if residency else 0)
    said = [
        ("context", f"{placement.ctx} of {prepared.config.context_length} tokens{each}, cache at {prepared.options.kv}"),
        ("layers", where(placement)), *on_gpu(placement, width),
        ("memory", f"{bar(((WEIGHTS, held), (CACHE, placement.host_kv_bytes), (OTHER, other)), budget.ram, width)} "
                   f"{format_size(placement.total_bytes)} of {format_size(budget.ram)}"),
        ("", f"{WEIGHTS} weights {format_size(held)}  {CACHE} cache {format_size(placement.host_kv_bytes)}  {OTHER} workspace "
             f"{format_size(placement.workspace_bytes)}, program {format_size(placement.baseline_bytes)}  {FREE} free"),
    ]
    if residency is not None:
        whole = max(residency.streamed_nbytes, placement.host_weights_bytes)  # what streams is counted in whole blocks of the disk
        said.append((disk, f"{bar(((WEIGHTS, residency.streamed_nbytes),), whole, width)} {format_size(residency.streamed_nbytes)} of "
                             f"{format_size(whole)} of weights, read for every token through {format_size(residency.ring_nbytes)}"))
    if paged:
        count = len(paged.parts.parts)
        said.append(("experts", f"{bar(((WEIGHTS, paged.slots),), count, width)} {paged.slots} of {count} in memory, "
                                f"{100 * paged.choice.hit_rate:.0f}% of what a token needs ({paged.choice.policy})"))
    if (neurons := describe_neurons(work, known)) is not None:
        said.append(("neurons", neurons))
    if placement.kv_disk_bytes:
        whole = placement.kv_disk_bytes + placement.kv_bytes
        said.append(("" if residency is not None else disk, f"{bar(((CACHE, placement.kv_disk_bytes),), whole, width)} "
                     f"{format_size(placement.kv_disk_bytes)} of {format_size(whole)} of cache, with a full context"))
    return said


# Tokens a second from which an answer comes so: people read some 250 words a minute, five or six tokens a second.
PACES = ((12, "faster than you read"), (4, "about as fast as you read"), (1, "more slowly than you read"),
         (0, "very slowly: a sentence may take a minute"))
TIERS = {"gpu": "on the GPU", "memory": "in memory", "disk": "from the disk"}


def where(placement: Placement) -> str:
    """The layers of each tier: ranges, or counts where tiers alternate."""
    tiers = placement.tiers
    starts = [0, *(layer for layer in range(1, len(tiers)) if tiers[layer] != tiers[layer - 1])]
    if len(starts) > MOST_RUNS:
        return ", ".join(f"{tiers.count(tier)} {TIERS[tier]}" for tier in dict.fromkeys(tiers))
    runs = zip(starts, [*starts[1:], len(tiers)], strict=True)
    return ", ".join(f"{first}{f'-{end - 1}' if end - first > 1 else ''} {TIERS[tiers[first]]}" for first, end in runs)


def on_gpu(placement: Placement, width: int = BAR) -> list[tuple[str, str]]:
    """The GPU tier as a bar, if a run may use one."""
    from ..offload.size import format_size

    gpu, whole = placement.gpu, placement.budget.vram
    if not whole:
        return []
    buffers = f", of that {format_size(gpu.buffers_bytes)} for copied layers" if gpu.buffers_bytes else ""
    head = f", of that {format_size(gpu.head_bytes)} the head's" if gpu.head_bytes else ""
    return [("GPU", f"{bar(((WEIGHTS, gpu.weights_bytes), (CACHE, gpu.kv_bytes), (OTHER, gpu.workspace_bytes)), whole, width)} "
                    f"{format_size(placement.vram_bytes)} of {format_size(whole)}"),
            ("", f"{WEIGHTS} weights {format_size(gpu.weights_bytes)}{head}  {CACHE} cache {format_size(gpu.kv_bytes)}  "
                 f"{OTHER} workspace {format_size(gpu.workspace_bytes)}{buffers}  {FREE} free")]


def drafts(prepared: Prepared) -> str:
    """The source of drafts, and what speeds per token mean with it."""
    from ..offload.size import format_size

    model, drafting = prepared.speculation.draft, prepared.speculation
    rounded = f", rounded to {drafting.draft_bits} bits like the model" if drafting.draft_bits else ""
    taken = "" if model is None else f" and by {model.folder.name} ({format_size(drafting.draft_nbytes)}{rounded})"
    if drafting.mtp:
        return (f"drafts by the model's own layer for multi-token prediction ({format_size(drafting.mtp_nbytes)}) and from the text, "
                "several verified in a pass: where they are right, tokens come faster than predicted")
    if not prepared.speculation.recycles and model is None:
        return "drafts where the text repeats, several tokens verified in a pass: repeats come faster"
    return f"drafts from the text{taken}, several verified in a pass: where they are right, tokens come faster than predicted"


def products(prepared: Prepared) -> list[tuple[str, str]]:
    """The matrix multiplication kernels, types that share one in one line."""
    from ..runtime.planning.chosen_kernels import chosen_kernels

    alike: dict[tuple[str, str], list[str]] = {}
    for each in chosen_kernels(prepared):
        alike.setdefault((each.token.name, each.prompt.name), []).append(each.stored)
    lines = [f"{', '.join(dict.fromkeys(stored))}: {token}" + (f"; {prompt} for prompts" if prompt != token else "")
             for (token, prompt), stored in alike.items()]
    return [("kernels" if index == 0 else "", line) for index, line in enumerate(lines)]


def paged_cache(prepared: Prepared, work: Work) -> str:
    """What of a token's cache is read from the disk, with a full context."""
    from ..offload.size import format_size

    if not (away := work.kv_disk_bytes(prepared.placement.ctx)):
        return ""
    return ", few of the pages on the disk" if prepared.options.kv_read == "sparse" else f", {format_size(away)} of it from the disk"


def speeds(found: Forecast) -> list[tuple[str, str]]:
    if found.start is None or found.full is None:
        return [("speed", f"not known: {found.reason}")]
    later = f" at the start, the {found.full.limit} then" if found.full.limit != found.start.limit else ""
    said = [("speed", f"about {rate(found.start.tokens_per_s)} tokens/s ({margin(found.start.error)}), "
                      f"{rate(found.full.tokens_per_s)} with a full context; the {found.start.limit} limits it{later}")]
    if found.prompt is not None:
        before = [f"{seconds(value)} of {what}" for value, what in ((found.begun_s, "starting"), (found.load_s, "loading from a cold disk"))
                  if value]
        load = f", after {' and '.join(before)}" if before else ""
        pace = rate(found.prompt_tokens / found.prompt.seconds)
        said.append(("first token", f"about {seconds(found.prompt.seconds)} ({margin(found.prompt.error)}) for a prompt of "
                                    f"{found.prompt_tokens} tokens, {pace} tokens/s{load}"))
    return said


def rate(value: float) -> str:
    """0.52, 18.2, 1590."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def seconds(value: float) -> str:
    """0.05 s, 3.2 s, 75 s."""
    return f"{value:.2g} s" if value < 10 else f"{value:.0f} s"


def bar(parts: Sequence[tuple[str, int]], whole: int, width: int = BAR) -> str:
    """Shares of `whole` as a bar: each nonzero part has at least one mark, the rest is free."""
    drawn = ""
    for mark, nbytes in parts:
        count = max(1, round(width * nbytes / whole)) if nbytes and whole else 0
        drawn += mark * min(count, width - len(drawn))
    return drawn + FREE * (width - len(drawn))
