"""`show` and `plan` for encoders, from their headers."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from .list_ import format_parameters
from .screen import Screen
from .serve_encoder import options_of

if TYPE_CHECKING:
    from ..runtime.catalog import ModelRef
    from .options import RunFlags


def show_encoder(model: str, ref: ModelRef, screen: Screen, json: bool) -> None:
    """Print what an encoder is. Raises what reading the headers raises, and UsageError if nothing states what the model outputs."""
    from ..offload.size import format_size
    from ..runtime.encoders.encoder import read_headers, tokenizer_of
    from ..runtime.hub import shown_licence
    from ..runtime.source import licence_of

    config, tensors, pooling = read_headers(ref.folder)
    tokenizer_of(ref.folder, config)
    licence, stored = ref.licence or licence_of(ref.folder), sorted({kind for kind, _, _ in tensors.values()})
    parameters, nbytes = sum(prod(shape) for _, shape, _ in tensors.values()), sum(nbytes for _, _, nbytes in tensors.values())
    if json:
        screen.json({"model": model, "folder": str(ref.folder), "repo": ref.repo, "revision": ref.revision, "licence": licence,
                     "family": config.family, "parameters": parameters, "size_bytes": nbytes, "stored": stored,
                     "context": config.context_length, "num_hidden_layers": config.num_hidden_layers, "hidden_size": config.hidden_size,
                     "intermediate_size": config.intermediate_size, "num_attention_heads": config.num_attention_heads,
                     "vocab_size": config.vocab_size, "ranks": config.ranks, "pooling": pooling and pooling.mode,
                     "vector": pooling and pooling.width(config.hidden_size), "tasks": [name for name, _ in config.tasks],
                     "warnings": list(config.warnings)})
        return
    for warning in config.warnings:
        screen.note(warning)
    makes = "scores of documents" if pooling is None else (
        f"embeddings of {pooling.width(config.hidden_size)} dimensions ({pooling.mode}" + (f", {len(pooling.dense)} dense layers after it)"
                                                                                   if pooling.dense else ")"))
    screen.pairs([pair for pair in (
        ("model", f"{model}, {config.family}, a bidirectional encoder: it generates no text"),
        ("from", f"{ref.repo}@{ref.revision}" if ref.repo else ""),
        ("folder" if ref.folder.is_dir() else "file", str(ref.folder)),
        ("licence", shown_licence(licence, "not stated")),
        ("parameters", f"{format_parameters(parameters)}, stored as {', '.join(stored)}, {format_size(nbytes)}"),
        ("layers", f"{config.num_hidden_layers}, hidden {config.hidden_size}, feed-forward {config.intermediate_size}"),
        ("attention", f"{config.num_attention_heads} heads of {config.head_dim}"),
        ("makes", makes),
        ("tasks", ", ".join(name for name, _ in config.tasks)),
        ("context", f"{config.context_length} tokens per text"),
        ("vocabulary", f"{config.vocab_size} tokens"),
    ) if pair[1]])


def plan_encoder(model: str, ref: ModelRef, engine: RunFlags, screen: Screen, json: bool) -> None:
    """Print the plan of serving an encoder. Raises DoesNotFit."""
    from ..offload.size import format_size
    from ..runtime.encoders import encoder

    made = encoder.plan_encoder(ref.folder, options_of(engine))
    for notice in made.notices:
        screen.note(notice)
    if json:
        screen.json({"model": model, "folder": str(ref.folder), "family": made.config.family, "context": made.context,
                     "threads": made.threads, "memory": {"weights_bytes": made.weight_bytes, "states_bytes": made.activation_bytes,
                                                         "program_bytes": made.baseline_bytes, "total_bytes": made.total_bytes,
                                                         "budget_bytes": made.budget_bytes}})
        return
    screen.pairs([
        ("model", f"{model}, {made.config.family}, for effllm {'serve' if made.config.ranks else 'embed and effllm serve'}"),
        ("memory", f"{format_size(made.total_bytes)} of {format_size(made.budget_bytes)}: weights {format_size(made.weight_bytes)}, "
                   f"activations {format_size(made.activation_bytes)}, program {format_size(made.baseline_bytes)}"),
        ("context", f"{made.context} tokens per text"),
        ("threads", str(made.threads)),
    ])
