"""`effllm serve` without MODEL, or with several: a router process, which holds no model, and a worker process for each model that is asked
for.

Flags apply to all models. Behind a router they reach each worker as environment variables do: a model that does not support one (a longer
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
from .loading import check_flags, find_any, requested_bits
from .options import CONTRADICTIONS, AnswerFlags, RunFlags, SamplingFlags, SessionFlags, WeightFlags
from .screen import Screen, truncate
from .serve import access_rules, say_page, say_request, slot_folder, start_log

if TYPE_CHECKING:
    from ..runtime.catalog import ModelRef
    from ..runtime.events import Progress

KEEP_ALIVE = LOAD_TIMEOUT = "5m"
# Of the front alone, as parameters of the command; a child gets none of them, typed or by a variable.
OWN = ("host", "port", "api_key", "name", "cors", "max_models", "keep_alive", "load_timeout", "no_webui", "ram", "json", "yes", "models")
ONE = {"name": "each model has its own name", "draft": "a draft model belongs to one model: effllm serve MODEL --draft SMALL-MODEL",
       "mmproj": "a projector belongs to one model, and is found beside it automatically: effllm serve MODEL --mmproj FILE",
       "lora": "an adapter belongs to one model: effllm serve MODEL --lora ADAPTER"}
MOST_NAMED = 10
GRACE_S = 2.0  # for workers, which end with the router, to end their streams


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


def serve_router(context: typer.Context, served: RouterOptions, answer: AnswerFlags, sampling: SamplingFlags, engine: RunFlags,
                 weights: WeightFlags, keeping: SessionFlags, screen: Screen, slot_save_path: str | None = None) -> int:
    """Serve until a signal."""
    for name, alternatives in ONE.items():
        if is_typed(context, name):
            raise UsageError(f"--{name} is for a server of one model", alternatives)
    if context.params["name"] is not None:
        screen.note("EFFLLM_NAME is ignored: each model has its own name")
    keep_s, silence_s = timeouts_of(served)
    check_flags(answer, sampling, engine, keeping)
    slot_folder(slot_save_path, engine.options(overflow=answer.overflow, parallel=served.parallel), screen)  # before a model is loaded
    requested_bits("MODEL", None, weights)
    from ..offload.size import parse_size
    from .server.guard import Guard
    from .server.http_server import bind_socket, serve_http, url_of
    from .server.model_pool import ModelPool, PoolLimits
    from .server.model_registry import ModelRegistry
    from .server.router import Router
    from .server.worker_process import WorkerLauncher

    variables = screen.environment.variables
    only = unique_models([find_any(model, screen) for model in served.models], screen) or None
    with bind_socket(served.host, served.port) as listening:
        rules, key = access_rules(listening, served.host, served.api_key, served.cors, screen, served.shows_page), secrets.token_urlsafe(32)
        flags, inherited = worker_flags(context, screen)

        def progress(name: str, event: Progress) -> None:
            screen.progress(replace(event, phase=f"{name}: {event.phase}"))

        starter = WorkerLauncher(["--host=127.0.0.1", "--port=0", *flags], {**inherited, "EFFLLM_API_KEY": key}, progress,
                                 lambda name, text: screen.note(f"{name}: {text}"), silence_s)
        limits = PoolLimits(None if engine.ram is None else parse_size(engine.ram), served.max_models, keep_s,
                            served.parallel + served.queue)
        pool = ModelPool(starter, limits, screen.note)
        registry = ModelRegistry(variables, only)
        names = [each.name for each in registry.models()]

        def ready() -> None:
            url = url_of(listening)
            more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
            screen.note(f"{url} serves {', '.join(names[:MOST_NAMED])}{more}, each loaded when a request names it; Ctrl-C stops it")
            say_page(screen, url, served.shows_page)
            if served.json:
                screen.json({"url": url, "models": names})
            start_log(screen)

        router = Router(registry, pool, key, engine.ctx, served.shows_page)
        serve_http(Guard(router.application(), rules, partial(say_request, screen, served.quiet)), listening, pool, ready,
                   screen.note_once, pool.closed, GRACE_S)
    return 0


def unique_models(models: Sequence[ModelRef], screen: Screen) -> list[ModelRef]:
    """Each model once: any shard of a split GGUF file stands for the model, and several may have been typed."""
    from ..runtime.gguf.file_names import all_parts

    made: dict[Path, ModelRef] = {}
    for ref in models:
        other = made.setdefault(ref.folder.absolute().with_name(all_parts(ref.folder.name)[0]), ref)
        if other is not ref and other.folder != ref.folder:
            screen.note(f"{ref.text} and {other.text} are parts of one model, which is served as {other.text}")
    # Variants of one folder in different formats are distinct.
    return [ref for ref in models if ref in made.values() or len(all_parts(ref.folder.name)) == 1]


def timeouts_of(served: RouterOptions) -> tuple[float, float]:
    """--keep-alive and --load-timeout in seconds. Raises UsageError for these and --max-models."""
    from .server.keep_alive import NEVER

    if served.max_models is not None and served.max_models < 1:
        raise UsageError(f"--max-models {served.max_models} is out of range", "1 or more; left out, as many as fit into memory")
    keep_s = seconds("--keep-alive", served.keep_alive, KEEP_ALIVE, "0 unloads at once, -1 never")
    return keep_s, seconds("--load-timeout", served.load_timeout, LOAD_TIMEOUT, "-1 forever") or NEVER  # 0, as Ollama has it


def seconds(flag: str, said: str | None, otherwise: str, more: str) -> float:
    """A duration flag in seconds. Raises UsageError."""
    from .server.keep_alive import parse_keep_alive

    try:
        return parse_keep_alive(otherwise if said is None else said)
    except ValueError:
        raise UsageError(f"{flag} {truncate(said or '', 20)} is not a duration", f"such as 90s, 5m or 1h; {more}") from None


def worker_flags(context: typer.Context, screen: Screen) -> tuple[list[str], dict[str, str]]:
    """How a worker is told to run its model: flags, and environment variables."""
    variables = {**screen.environment.variables, "NO_COLOR": "1"}  # what it says is a part of lines that are said here
    groups = {field.name for group in (RunFlags, WeightFlags) for field in flags_of(group)}
    parameters = {each.name: each for each in context.command.params if each.param_type_name == "option" and each.envvar}
    flags = []
    for name, parameter in parameters.items():
        if name in OWN:
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
    found = []
    for pair in CONTRADICTIONS:
        own = [each for each in pair if each[0] == name and each[1] in (None, value)]
        found += [other for other, _ in pair if own and other != name]
    return found
