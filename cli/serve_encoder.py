"""`effllm serve` of an encoder: embeddings or reranking."""

from __future__ import annotations

from collections.abc import Set
from functools import partial
from typing import TYPE_CHECKING

import typer

from .. import UsageError
from .flags import is_typed, long_name
from .loading import final_result
from .screen import Screen

if TYPE_CHECKING:
    from ..runtime.catalog import ModelRef
    from ..runtime.encoders.encoder import Encoder, EncoderOptions
    from .options import EngineFlags, RunFlags
    from .serve import ServerOptions

# Parameters that apply to encoders; all others are for generative models.
ENCODER_PARAMETERS = {"models", "host", "port", "api_key", "name", "cors", "queue", "no_webui", "quiet", "json", "yes", "ctx", "threads",
                      "ram", "strict", "device", "debug", "no_color", "offline"}


def serve_encoder(context: typer.Context, ref: ModelRef, engine: RunFlags, server_options: ServerOptions, screen: Screen) -> None:
    """Serve an encoder until a signal."""
    router_link = screen.environment.router_link
    check_encoder_flags(context, ref, None if router_link is None else frozenset(each.name for each in context.command.params))
    from ..runtime.generation.served_encoder import ServedEncoder
    from .serve import log_request, report_ready
    from .server.answer_queue import AnswerQueue
    from .server.encoder_service import EncoderService
    from .server.guard import Guard
    from .server.http_server import GRACE_S, exit_now, serve_http

    encoder = open_encoder_with_progress(ref, engine, screen)
    answer_queue = AnswerQueue(server_options.queue)
    service = EncoderService(ServedEncoder(encoder), answer_queue, server_options.name, screen.note_once, server_options.other_names, False)

    description = "ranks documents" if encoder.ranks else f"computes embeddings of {encoder.width} dimensions"
    ready = partial(report_ready, screen, server_options, f"which {description}, texts of up to {encoder.n_ctx} tokens", encoder.n_ctx,
                    encoder.plan.total_bytes, 1)
    guard = Guard(service.application(), server_options.rules, partial(log_request, screen, server_options.quiet))
    serve_http(guard, server_options.listening, answer_queue, ready, screen.note_once)
    if not answer_queue.join(GRACE_S):
        exit_now()


def check_encoder_flags(context: typer.Context, ref: ModelRef, allowed: Set[str] | None = None) -> None:
    """Raises UsageError for quantization on load, and for typed flags that only apply to generative models. `allowed`: further parameters
    that are accepted."""
    if ref.variant:
        raise UsageError(f"{ref.text}: this model runs as stored", f"leave out :{ref.variant}")
    for parameter in context.command.params:
        if parameter.name not in ENCODER_PARAMETERS | (allowed or frozenset()) and is_typed(context, parameter.name):
            raise UsageError(f"{long_name(parameter.opts)} is for models that generate text, and this one does not", "leave it out")


def options_of(engine: EngineFlags) -> EncoderOptions:
    from ..runtime.encoders.encoder import EncoderOptions

    return EncoderOptions(engine.ctx, engine.threads, engine.ram, engine.strict, "ctx" in engine.from_settings)


def open_encoder_with_progress(ref: ModelRef, engine: EngineFlags, screen: Screen) -> Encoder:
    """The loaded encoder. In a worker, the memory is negotiated with the router first."""
    from ..runtime.encoders.encoder import Encoder, open_encoder, plan_encoder, tokenizer_of

    options, router_link = options_of(engine), screen.environment.router_link
    plan = plan_encoder(ref.folder, options)
    tokenizer = tokenizer_of(ref.folder, plan.config)
    for remark in (*plan.notices, *tokenizer.warnings):
        screen.note(remark)
    if router_link is not None:
        options = router_link.negotiate_memory(options, lambda options: plan_encoder(ref.folder, options).total_bytes)
        plan = plan_encoder(ref.folder, options)
    return final_result(open_encoder(plan, tokenizer), screen, Encoder)
