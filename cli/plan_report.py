"""The report of `effllm plan`: as text with bars, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .number_format import margin

if TYPE_CHECKING:
    from ..offload.placement import Placement
    from ..offload.predict import Prediction, Work
    from ..runtime.planning.forecast import Forecast, Suggestion
    from ..runtime.planning.roofs import Roofs
    from ..runtime.prepare import Prepared
    from ..runtime.pull.plan import PullPlan

BAR = 40  # columns
MAX_RANGES = 4  # of layers; where tiers alternate more often, counts are shown instead
WEIGHTS, CACHE, OTHER, FREE = "█", "▓", "▒", "·"


def report(model: str, prepared: Prepared, roofs: Roofs, forecast: Forecast, suggestion: Suggestion | None) -> dict[str, object]:
    """The document of `--json`; its keys are stable. `weights_bytes` of a tier: memory taken, or bytes read per token; `tensor_bytes`: the
    tensors stored there. With sparse reading, the cache bytes per token from the disk are the maximum."""
    from ..runtime.adapters.dora import resolve_lengths_s
    from ..runtime.planning.chosen_kernels import chosen_kernels
    from ..runtime.weights.weight_tiers import weight_tiers

    placement, work = prepared.placement, forecast.work

    def prediction_json(prediction: Prediction | None, tokens: int = 1) -> dict[str, object] | None:
        return prediction and {"seconds": prediction.seconds, "tokens_per_s": tokens * prediction.tokens_per_s, "error": prediction.error,
                               "limit": prediction.limit, "disk_s": prediction.disk_s, "memory_s": prediction.memory_s,
                               "processor_s": prediction.processor_s}

    residency, drafting, paged = placement.residency, prepared.speculation, placement.expert_slots is not None and prepared.streaming
    pinned_bytes, tensor_bytes = placement.pinned_bytes, weight_tiers(prepared)
    return {
        "model": model, "ctx": placement.ctx, "parallel": prepared.options.parallel, "kv": prepared.options.kv,
        "devices": devices(placement),
        "weights_bytes": placement.weights_bytes, "kv_bytes": placement.kv_bytes, "workspace_bytes": placement.workspace_bytes,
        "baseline_bytes": placement.baseline_bytes, "total_bytes": placement.total_bytes, "ram_bytes": placement.budget.ram,
        "vram_bytes": placement.budget.vram, "notes": list(placement.notes), "layers": list(placement.tiers),
        "copied_from_tokens": placement.copied_from,
        "experts": paged.to_json() if paged else None,
        "tiers": {"memory": {"weights_bytes": paged.held_nbytes if paged else pinned_bytes, "tensor_bytes": tensor_bytes.memory,
                             "always_bytes": tensor_bytes.always, "ring_bytes": residency.ring_nbytes if residency else 0,
                             "kv_bytes": placement.host_kv_bytes,
                             "other_bytes": placement.workspace_bytes + placement.baseline_bytes},
                  "disk": {"weights_bytes": paged.away_nbytes if paged else placement.streamed_bytes, "tensor_bytes": tensor_bytes.disk,
                           "neuron_bytes": work.neuron_bytes, "kv_bytes": placement.kv_disk_bytes},
                  "gpu": {"total_bytes": placement.vram_bytes, "weights_bytes": placement.gpu.weights_bytes,
                          "tensor_bytes": tensor_bytes.gpu, "kv_bytes": placement.gpu.kv_bytes,
                          "other_bytes": placement.gpu.workspace_bytes,
                          "copied_layers_bytes": placement.gpu.buffers_bytes, "head_bytes": placement.gpu.head_bytes}},
        "per_token": {"weights_bytes": work.bytes_per_token, "disk_bytes": work.streamed + round(work.missed_bytes),
                      "kv_bytes_at_full_context": work.kv_at(placement.ctx),
                      "kv_disk_bytes_at_full_context": work.kv_disk_bytes(placement.ctx)},
        "prediction": {"start": prediction_json(forecast.start), "full_context": prediction_json(forecast.full),
                       "prompt": prediction_json(forecast.prompt, forecast.prompt_tokens), "prompt_tokens": forecast.prompt_tokens,
                       "load_s": forecast.load_s, "program_s": forecast.startup_s,
                       "unknown": forecast.reason or None},
        "kernels": [each.to_json() for each in chosen_kernels(prepared)],
        "speculation": {"lookup": drafting.lookup, "draft": prepared.options.draft if drafting.draft else None,
                        "draft_bytes": drafting.draft_nbytes, "draft_bits": drafting.draft_bits or None, "mtp": drafting.mtp,
                        "mtp_bytes": drafting.mtp_nbytes},
        "adapters": {"names": list(prepared.adapters.names), "matrices": len(prepared.adapters.weights), "rank": prepared.adapters.rank,
                     "bytes": prepared.adapters.nbytes, "measuring_s": resolve_lengths_s(prepared)},
        "media_bytes": sum(prepared.media_nbytes.values()),
        "suggestion": suggestion and {"flag": suggestion.flag, "tokens_per_s": suggestion.tokens_per_s, "gain": suggestion.gain,
                                  "full_context": suggestion.full},
        "machine": roofs.machine and {"date": roofs.machine.date, "memory_bytes_per_s": roofs.machine.memory},
        "disk": roofs.disk and {"date": roofs.disk.date, "bytes_per_s": roofs.disk.disk.stream_rate, "direct": roofs.disk.disk.direct},
    }


def devices(placement: Placement) -> dict[str, int]:
    return {device: placement.devices.count(device) for device in dict.fromkeys(placement.devices)}


def lines(model: str, prepared: Prepared, roofs: Roofs, prediction: Forecast, suggestion: Suggestion | None,
          pull_plan: PullPlan | None = None, width: int = BAR) -> list[tuple[str, str]]:
    """The report as text, with bars of `width`."""
    from ..offload.size import format_size
    from ..runtime.planning import forecast

    placement, work = prepared.placement, prediction.work
    read = work.streamed + round(work.missed_bytes)
    # streamed bytes are counted in whole disk blocks, which may be more than the weights
    from_disk = f"{format_size(read)} of them" if read < work.bytes_per_token else "all of them"
    lines = [("model", f"{model} ({prepared.config.family})")]
    if pull_plan is not None:
        from ..runtime.hub import shown_licence
        from .pull import reproducing_flags

        lines.append(("not here", f"effllm pull {pull_plan.target.reference.text}{reproducing_flags(pull_plan)} downloads "
                                  f"{format_size(pull_plan.download_bytes)}, keeps {format_size(pull_plan.kept_bytes)}; licence "
                                  f"{shown_licence(pull_plan.licence, 'not stated')}{', gated' if pull_plan.repository.gated else ''}"))
    lines += [("fits", verdict(prepared, prediction)), *tiers(prepared, work, roofs, width)]
    lines += [("per token", f"{format_size(work.bytes_per_token)} of weights"
              + (f", {from_disk} from the disk" if read else "")
              + f", up to {format_size(work.kv_at(placement.ctx))} of cache{paged_cache(prepared, work)}"),
             *products(prepared), *speeds(prediction)]
    if prepared.adapters.names:
        from ..runtime.adapters.dora import resolve_lengths_s

        adapters = prepared.adapters
        norms = ""
        if adapters.lengths:
            norms = f"; computing row norms for DoRA takes about {seconds(resolve_lengths_s(prepared))} at each start"
        lines.append(("adapters", f"{', '.join(adapters.names)}: beside {len(adapters.weights)} matrices, rank {adapters.rank}, "
                                  f"{format_size(adapters.nbytes)}{norms}"))
    lines += [(modality.plural, f"supported; the {modality.tower} takes {format_size(nbytes)}, counted as program memory")
             for modality, nbytes in prepared.media_nbytes.items()]
    if prepared.speculation:
        lines.append(("speculation", drafts(prepared)))
    if suggestion is not None:
        lines.append(("faster", f"{suggestion.flag}: {suggestion.gain:.1f} times as fast"
                     f" ({rate(suggestion.tokens_per_s)} tokens/s{' with a full context' if suggestion.full else ''})"))
    if roofs.machine is not None:
        disk = f", disk {roofs.disk.disk.stream_rate / 1e9:.2f} GB/s ({roofs.disk.date})" if roofs.disk else ""
        lines.append(("measured", f"memory {roofs.machine.memory / 1e9:.1f} GB/s, kernels ({roofs.machine.date}){disk}"))
        if others := roofs.machine.disturbed_of(forecast.wanted(prepared)):
            lines.append(("", f"other programs had up to {round(100 * max(others.values()))}% of the cores' time then: the next plan that "
                             "finds them free measures again"))
    return lines


def verdict(prepared: Prepared, prediction: Forecast) -> str:
    """The plan in one sentence."""
    placement = prepared.placement
    where_held = " and ".join(TIERS[tier] for tier in ("gpu", "memory") if tier in placement.tiers) or TIERS["memory"]
    is_partly_on_disk = placement.streamed_bytes or placement.kv_disk_bytes or "disk" in placement.tiers or prepared.streaming
    summary = f"partly: what does not fit {where_held} is read from the disk" if is_partly_on_disk else f"yes, all of it {where_held}"
    if prediction.start is None:
        return summary
    reading_speed = next(words for minimum, words in PACES if prediction.start.tokens_per_s >= minimum)
    return f"{summary}; answers come {reading_speed}"


def tiers(prepared: Prepared, work: Work, roofs: Roofs, width: int = BAR, disk: str = "disk") -> list[tuple[str, str]]:
    """What each tier holds, with bars of `width`. `disk`: the name of the line for what is read from the disk."""
    from ..offload.size import format_size
    from ..runtime.planning.forecast import describe_neurons

    placement = prepared.placement
    residency, budget = placement.residency, placement.budget
    other = placement.workspace_bytes + placement.baseline_bytes
    paged = placement.expert_slots is not None and prepared.streaming
    each = f" for each of {prepared.options.parallel} answers" if prepared.options.parallel > 1 else ""
    weights_bytes = paged.held_nbytes if paged else placement.pinned_bytes + (residency.ring_nbytes if residency else 0)
    lines = [
        ("context", f"{placement.ctx} of {prepared.config.context_length} tokens{each}, cache at {prepared.options.kv}"),
        ("layers", where(placement)), *on_gpu(placement, width),
        ("memory", f"{bar(((WEIGHTS, weights_bytes), (CACHE, placement.host_kv_bytes), (OTHER, other)), budget.ram, width)} "
                   f"{format_size(placement.total_bytes)} of {format_size(budget.ram)}"),
        ("", f"{WEIGHTS} weights {format_size(weights_bytes)}  {CACHE} cache {format_size(placement.host_kv_bytes)}  {OTHER} workspace "
             f"{format_size(placement.workspace_bytes)}, program {format_size(placement.baseline_bytes)}  {FREE} free"),
    ]
    if residency is not None:
        whole = max(residency.streamed_nbytes, placement.host_weights_bytes)  # streamed bytes are counted in whole disk blocks
        lines.append((disk, f"{bar(((WEIGHTS, residency.streamed_nbytes),), whole, width)} {format_size(residency.streamed_nbytes)} of "
                             f"{format_size(whole)} of weights, read for every token through {format_size(residency.ring_nbytes)}"))
    if paged:
        count = len(paged.parts.parts)
        lines.append(("experts", f"{bar(((WEIGHTS, paged.slots),), count, width)} {paged.slots} of {count} in memory, "
                                f"{100 * paged.choice.hit_rate:.0f}% of what a token needs ({paged.choice.policy})"))
    if (neurons := describe_neurons(work, roofs)) is not None:
        lines.append(("neurons", neurons))
    if placement.kv_disk_bytes:
        whole = placement.kv_disk_bytes + placement.kv_bytes - placement.kv_ring_bytes
        lines.append(("" if residency is not None else disk, f"{bar(((CACHE, placement.kv_disk_bytes),), whole, width)} "
                     f"{format_size(placement.kv_disk_bytes)} of {format_size(whole)} of cache, with a full context"))
    return lines


# (minimum tokens/s, words): people read about 250 words a minute, which is five or six tokens a second.
PACES = ((12, "faster than you read"), (4, "about as fast as you read"), (1, "more slowly than you read"),
         (0, "very slowly: a sentence may take a minute"))
TIERS = {"gpu": "on the GPU", "memory": "in memory", "disk": "from the disk"}


def where(placement: Placement) -> str:
    """The layers of each tier: ranges, or counts where tiers alternate."""
    tiers = placement.tiers
    starts = [0, *(layer for layer in range(1, len(tiers)) if tiers[layer] != tiers[layer - 1])]
    if len(starts) > MAX_RANGES:
        return ", ".join(f"{tiers.count(tier)} {TIERS[tier]}" for tier in dict.fromkeys(tiers))
    runs = zip(starts, [*starts[1:], len(tiers)], strict=True)
    return ", ".join(f"{first}{f'-{end - 1}' if end - first > 1 else ''} {TIERS[tiers[first]]}" for first, end in runs)


def on_gpu(placement: Placement, width: int = BAR) -> list[tuple[str, str]]:
    """The GPU tier as a bar, if a run may use one."""
    from ..offload.size import format_size

    gpu, budget = placement.gpu, placement.budget.vram
    if not budget:
        return []
    buffers = f", of that {format_size(gpu.buffers_bytes)} for copied layers" if gpu.buffers_bytes else ""
    head = f", of that {format_size(gpu.head_bytes)} the head's" if gpu.head_bytes else ""
    return [("GPU", f"{bar(((WEIGHTS, gpu.weights_bytes), (CACHE, gpu.kv_bytes), (OTHER, gpu.workspace_bytes)), budget, width)} "
                    f"{format_size(placement.vram_bytes)} of {format_size(budget)}"),
            ("", f"{WEIGHTS} weights {format_size(gpu.weights_bytes)}{head}  {CACHE} cache {format_size(gpu.kv_bytes)}  "
                 f"{OTHER} workspace {format_size(gpu.workspace_bytes)}{buffers}  {FREE} free")]


def drafts(prepared: Prepared) -> str:
    """The source of drafts, and what speeds per token mean with it."""
    from ..offload.size import format_size

    draft_model, drafting = prepared.speculation.draft, prepared.speculation
    rounded = f", rounded to {drafting.draft_bits} bits like the model" if drafting.draft_bits else ""
    draft_text = "" if draft_model is None else f" and by {draft_model.folder.name} ({format_size(drafting.draft_nbytes)}{rounded})"
    if drafting.mtp:
        return (f"drafts by the model's own layer for multi-token prediction ({format_size(drafting.mtp_nbytes)}) and from the text, "
                "several verified in a pass: where they are right, tokens come faster than predicted")
    if not prepared.speculation.recycles and draft_model is None:
        return "drafts where the text repeats, several tokens verified in a pass: repeats come faster"
    return f"drafts from the text{draft_text}, several verified in a pass: where they are right, tokens come faster than predicted"


def products(prepared: Prepared) -> list[tuple[str, str]]:
    """The matrix multiplication kernels, types that share one in one line."""
    from ..runtime.planning.chosen_kernels import chosen_kernels

    by_kernel: dict[tuple[str, str], list[str]] = {}
    for choice in chosen_kernels(prepared):
        by_kernel.setdefault((choice.token.name, choice.prompt.name), []).append(choice.stored)
    lines = [f"{', '.join(dict.fromkeys(stored))}: {token}" + (f"; {prompt} for prompts" if prompt != token else "")
             for (token, prompt), stored in by_kernel.items()]
    return [("kernels" if index == 0 else "", line) for index, line in enumerate(lines)]


def paged_cache(prepared: Prepared, work: Work) -> str:
    """How much cache a token reads from the disk with a full context, as the end of a line; empty for none."""
    from ..offload.size import format_size

    if not (disk_bytes := work.kv_disk_bytes(prepared.placement.ctx)):
        return ""
    return ", few of the pages on the disk" if prepared.options.kv_read == "sparse" else f", {format_size(disk_bytes)} of it from the disk"


def speeds(prediction: Forecast) -> list[tuple[str, str]]:
    if prediction.start is None or prediction.full is None:
        return [("speed", f"not known: {prediction.reason}")]
    limit_later = f" at the start, the {prediction.full.limit} then" if prediction.full.limit != prediction.start.limit else ""
    lines = [("speed", f"about {rate(prediction.start.tokens_per_s)} tokens/s ({margin(prediction.start.error)}), "
                      f"{rate(prediction.full.tokens_per_s)} with a full context; the {prediction.start.limit} limits it{limit_later}")]
    if prediction.prompt is not None:
        phases = ((prediction.startup_s, "starting"), (prediction.load_s, "loading from a cold disk"))
        startup = [f"{seconds(value)} of {phase}" for value, phase in phases if value]
        load = f", after {' and '.join(startup)}" if startup else ""
        prompt_rate = rate(prediction.prompt_tokens / prediction.prompt.seconds)
        lines.append(("first token", f"about {seconds(prediction.prompt.seconds)} ({margin(prediction.prompt.error)}) for a prompt of "
                                    f"{prediction.prompt_tokens} tokens, {prompt_rate} tokens/s{load}"))
    return lines


def rate(value: float) -> str:
    """0.52, 18.2, 1590."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def seconds(value: float) -> str:
    """0.05 s, 3.2 s, 75 s."""
    return f"{value:.2g} s" if value < 10 else f"{value:.0f} s"


def bar(parts: Sequence[tuple[str, int]], whole: int, width: int = BAR) -> str:
    """Shares of `whole` as a bar: each nonzero part has at least one mark, the rest is free."""
    marks = ""
    for mark, nbytes in parts:
        count = max(1, round(width * nbytes / whole)) if nbytes and whole else 0
        marks += mark * min(count, width - len(marks))
    return marks + FREE * (width - len(marks))
