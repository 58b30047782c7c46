"""`effllm serve` without MODEL, or with several: a router process, which holds no model, and a worker process for each requested model.

Flags apply to all models. They are passed to each worker as environment variables, so that a model which does not support one (a longer
context than its own, bits where it has fewer) ignores it with a notice, while the others use it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .. import UsageError
from .flags import flags_of, is_typed, long_name
from .loading import check_flags, find_model_variant, requested_bits
from .options import CONTRADICTIONS, AnswerFlags, RunFlags, SamplingFlags, SessionFlags, WeightFlags
from .screen import Screen, truncate
from .serve import access_rules, log_request, note_page, slot_folder, start_log

if TYPE_CHECKING:
    from ..runtime.catalog import ModelRef
    from ..runtime.events import Progress

KEEP_ALIVE = LOAD_TIMEOUT = "5m"
# Parameters of the router, which are not passed to workers.
ROUTER_PARAMETERS = ("host", "port", "api_key", "name", "cors", "max_models", "keep_alive", "load_timeout", "no_webui", "ram", "json",
                     "yes", "models")
# Parameters that need a server of one model -> hint.
SINGLE_MODEL_HINTS = {
    "name": "each model has its own name", "draft": "a draft model belongs to one model: effllm serve MODEL --draft SMALL-MODEL",
    "mmproj": "a projector belongs to one model, and is found beside it automatically: effllm serve MODEL --mmproj FILE",
    "lora": "an adapter belongs to one model: effllm serve MODEL --lora ADAPTER"}
MAX_NAMED = 10
GRACE_S = 2.0  # for workers to end their streams when the router ends


@dataclass(frozen=True)
class RouterOptions:
    """The flags of the router itself."""

    models: Sequence[str]
    host: str
    port: int
    api_key: str | None
    cors: list[str] | None
    parallel: int
    queue: int
    max_models: int | None
    keep_alive: str | None
    load_timeout: str | None
    quiet: bool
    json: bool
    shows_page: bool


def serve_router(context: typer.Context, router_options: RouterOptions, answer: AnswerFlags, sampling: SamplingFlags, engine: RunFlags,
                 weights: WeightFlags, session_flags: SessionFlags, screen: Screen, slot_save_path: str | None = None) -> int:
    """Route requests to models until a signal."""
    for name, hint in SINGLE_MODEL_HINTS.items():
        if is_typed(context, name):
            raise UsageError(f"--{name} is for a server of one model", hint)
    if context.params["name"] is not None:
        screen.note("EFFLLM_NAME is ignored: each model has its own name")
    keep_alive_s, load_timeout_s = parse_timeouts(router_options)
    check_flags(answer, sampling, engine, session_flags)
    # The folder is only checked here: each worker gets the flag.
    slot_folder(slot_save_path, engine.options(overflow=answer.overflow, parallel=router_options.parallel), screen)
    requested_bits("MODEL", None, weights)
    from ..offload.size import parse_size
    from .server.guard import Guard
    from .server.http_server import bind_socket, serve_http, url_of
    from .server.model_pool import ModelPool, PoolLimits
    from .server.model_registry import ModelRegistry
    from .server.router import Router
    from .server.worker_process import WorkerLauncher

    variables = screen.environment.variables
    models = unique_models([find_model_variant(model, screen) for model in router_options.models], screen) or None
    with bind_socket(router_options.host, router_options.port) as bound_socket:
        rules = access_rules(bound_socket, router_options.host, router_options.api_key, router_options.cors, screen,
                             router_options.shows_page)
        key = secrets.token_urlsafe(32)
        flags, inherited = worker_flags(context, screen)

        def progress(name: str, event: Progress) -> None:
            screen.progress(replace(event, phase=f"{name}: {event.phase}"))

        launcher = WorkerLauncher(["--host=127.0.0.1", "--port=0", *flags], {**inherited, "EFFLLM_API_KEY": key}, progress,
                                 lambda name, text: screen.note(f"{name}: {text}"), load_timeout_s)
        limits = PoolLimits(None if engine.ram is None else parse_size(engine.ram), router_options.max_models, keep_alive_s,
                            router_options.parallel + router_options.queue)
        pool = ModelPool(launcher, limits, screen.note)
        registry = ModelRegistry(variables, models)
        names = [each.name for each in registry.models()]

        def ready() -> None:
            url = url_of(bound_socket)
            rest = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
            screen.note(f"{url} serves {', '.join(names[:MAX_NAMED])}{rest}, each loaded when a request names it; Ctrl-C stops it")
            note_page(screen, url, router_options.shows_page)
            if router_options.json:
                screen.json({"url": url, "models": names})
            start_log(screen)

        router = Router(registry, pool, key, engine.ctx, router_options.shows_page)
        serve_http(Guard(router.application(), rules, partial(log_request, screen, router_options.quiet)), bound_socket, pool, ready,
                   screen.note_once, pool.closed, GRACE_S)
    return 0


def unique_models(models: Sequence[ModelRef], screen: Screen) -> list[ModelRef]:
    """The models without duplicates: several shards of one split GGUF file are the same model, which is noted."""
    from ..runtime.gguf.file_names import all_parts

    by_path: dict[Path, ModelRef] = {}
    for ref in models:
        other = by_path.setdefault(ref.folder.absolute().with_name(all_parts(ref.folder.name)[0]), ref)
        if other is not ref and other.folder != ref.folder:
            screen.note(f"{ref.text} and {other.text} are parts of one model, which is served as {other.text}")
    # Variants of one folder in different formats are distinct.
    return [ref for ref in models if ref in by_path.values() or len(all_parts(ref.folder.name)) == 1]


def parse_timeouts(router_options: RouterOptions) -> tuple[float, float]:
    """--keep-alive and --load-timeout in seconds. Raises UsageError for these and --max-models."""
    from .server.keep_alive import NEVER

    if router_options.max_models is not None and router_options.max_models < 1:
        raise UsageError(f"--max-models {router_options.max_models} is out of range", "1 or more; left out, as many as fit into memory")
    keep_alive_s = parse_seconds("--keep-alive", router_options.keep_alive, KEEP_ALIVE, "0 unloads at once, -1 never")
    load_timeout_s = parse_seconds("--load-timeout", router_options.load_timeout, LOAD_TIMEOUT, "-1 forever")
    return keep_alive_s, load_timeout_s or NEVER  # 0 is no limit, as in Ollama


def parse_seconds(flag: str, text: str | None, default: str, hint: str) -> float:
    """The value of a duration flag in seconds, `default` if it was not given. Raises UsageError."""
    from .server.keep_alive import parse_keep_alive

    try:
        return parse_keep_alive(default if text is None else text)
    except ValueError:
        raise UsageError(f"{flag} {truncate(text or '', 20)} is not a duration", f"such as 90s, 5m or 1h; {hint}") from None


def worker_flags(context: typer.Context, screen: Screen) -> tuple[list[str], dict[str, str]]:
    """The flags and the environment variables of a worker."""
    variables = {**screen.environment.variables, "NO_COLOR": "1"}  # its notes become parts of the router's
    groups = {field.name for group in (RunFlags, WeightFlags) for field in flags_of(group)}
    parameters = {each.name: each for each in context.command.params if each.param_type_name == "option" and each.envvar}
    flags = []
    for name, parameter in parameters.items():
        if name in ROUTER_PARAMETERS:
            variables.pop(parameter.envvar, None)
            continue
        value = context.params.get(name)
        if not is_typed(context, name) or value is None:
            continue
        if name in groups:
            for other in excluded_flags(name, value):
                variables.pop(parameters[other].envvar, None)
            variables[parameter.envvar] = "1" if value is True else str(value)
        elif value is True:
            flags.append(long_name(parameter.opts))
        else:
            flags += [f"{long_name(parameter.opts)}={each}" for each in (value if isinstance(value, list) else [value])]
    return flags, variables


def excluded_flags(name: str, value: object) -> list[str]:
    """The flags that a flag's value excludes."""
    excluded = []
    for pair in CONTRADICTIONS:
        matching = [each for each in pair if each[0] == name and each[1] in (None, value)]
        excluded += [other for other, _ in pair if matching and other != name]
    return excluded
