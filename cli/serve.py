"""`effllm serve`: an HTTP server of models with the APIs of other programs, implemented in `server/`. One model is served here, several by
`serve_router.py`."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from .. import UsageError
from .answer import format_token_count
from .flags import add_command, flag, is_typed
from .loading import (
    check_flags,
    find_or_absent,
    open_model,
    pull_if_absent,
    quantized_on_load,
    reasoning_options,
    resolve_draft,
    with_mmproj,
)
from .number_format import duration, rounded
from .options import (
    OUTPUT,
    AnswerFlags,
    Json,
    Mmproj,
    Models,
    Parallel,
    RunFlags,
    SamplingFlags,
    SessionDisk,
    SessionFlags,
    WeightFlags,
    Yes,
)
from .saving import SessionSaver
from .screen import Screen, truncate

if TYPE_CHECKING:
    from socket import socket

    from ..runtime.catalog import ModelRef
    from ..runtime.constraints.constraint import Constraint
    from ..runtime.engine import Engine
    from ..runtime.events import Stats
    from ..runtime.generation.served_model import GenerationOptions
    from ..runtime.prepare import EngineOptions
    from ..runtime.sampler import SamplerSettings
    from ..runtime.sessions.prompt_cache import PromptCache
    from ..runtime.sessions.slot_files import SlotFiles
    from .server.guard import AccessRules
    from .server.streams import RequestRecord

SERVER = "server"
MAX_PATH, MAX_REASON = 100, 200  # columns of a path, and of why a request was refused
EXAMPLES = """examples

  effllm serve fable
  effllm serve qwen3-4b --bits 4 -c 16k --port 9000
  effllm serve qwen3-4b --parallel 4 -c 8k
  effllm serve fable --host 0.0.0.0 --api-key "$(cat key.txt)"
  effllm serve                                   # every model on this machine, by name
  effllm serve qwen3-4b fable --keep-alive 1h    # these two

Open http://127.0.0.1:8080 in a browser for a chat. Point programs for OpenAI's API to http://127.0.0.1:8080/v1, those for Anthropic's,
Google's and Ollama's to http://127.0.0.1:8080 (the last expect --port 11434). Any key will do unless --api-key is given. One
answer is generated at a time, or N with --parallel N; other requests wait in order. The flags set what a request leaves open. Without
MODEL, or with several, each request names its model. A model is loaded at its first request; when memory is short, the least recently
used one is unloaded.
"""

Host = Annotated[str, flag(SERVER, "--host", "ADDRESS", "address to listen on; 0.0.0.0 is every address of this machine (127.0.0.1)")]
Port = Annotated[int, flag(SERVER, "--port", "N", "port to listen on; 0 takes a free one and prints it (8080)")]
ApiKey = Annotated[str | None, flag(SERVER, "--api-key", "KEY", "key that requests must send (none)")]
Name = Annotated[str | None, flag(SERVER, "--name", "NAME", "name of the one MODEL in requests and answers (as MODEL)")]
Cors = Annotated[list[str] | None, flag(SERVER, "--cors", "ORIGIN",
                                        "let web pages of this origin send requests, such as https://chat.example, and accept its "
                                        "host name; * is all pages; may be repeated (those of this machine)")]
SlotSavePath = Annotated[str | None, flag(SERVER, "--slot-save-path", "DIR",
                                          "folder where programs may save and restore slots, with llama-server's /slots/N (nowhere)")]
Queue = Annotated[int, flag(SERVER, "--queue", "N", "how many requests may wait in the queue (32)")]
KeepPrompts = Annotated[bool, flag(SERVER, "--keep-prompts", "",
                                   "save the caches of conversations when the server ends, for its next start")]
MaxModels = Annotated[int | None, flag(SERVER, "--max-models", "N", "with several models: how many may be loaded at once (as many as fit)")]
KeepAlive = Annotated[str | None, flag(SERVER, "--keep-alive", "TIME",
                                       "with several models: how long an unused one stays loaded, such as 30s or 1h; 0 unloads it after "
                                       "its answer, -1 never (5m)")]
LoadTimeout = Annotated[str | None, flag(SERVER, "--load-timeout", "TIME",
                                         "with several models: how long loading may go without progress before it is aborted; -1 is "
                                         "forever (5m)")]
NoWebui = Annotated[bool, flag(SERVER, "--no-webui", "", "do not serve the chat page for browsers")]
Quiet = Annotated[bool, flag(OUTPUT, "--quiet", "", "do not log requests")]


def register(app: typer.Typer) -> None:
    add_command(app, "serve", "run a model", serve, EXAMPLES)


def serve(context: typer.Context, models: Models = None, host: Host = "127.0.0.1", port: Port = 8080, api_key: ApiKey = None,
          name: Name = None, cors: Cors = None, parallel: Parallel = 1, queue: Queue = 32, keep_prompts: KeepPrompts = False,
          session_disk: SessionDisk = None, slot_save_path: SlotSavePath = None, max_models: MaxModels = None,
          keep_alive: KeepAlive = None, load_timeout: LoadTimeout = None, no_webui: NoWebui = False, *, answer: AnswerFlags,
          sampling: SamplingFlags, engine: RunFlags, mmproj: Mmproj = None, weights: WeightFlags, quiet: Quiet = False,
          json: Json = False, yes: Yes = False) -> int:
    """Serve a model over APIs like OpenAI's, Anthropic's, Google's, Ollama's and llama.cpp's; without MODEL, every model on this machine.
    --json prints an object once it listens."""
    router_link = context.obj.router_link
    screen = Screen(context.obj) if router_link is None else router_link.screen()
    check_server_flags(api_key, name, cors, queue)
    if len(models or ()) != 1:
        from .serve_router import RouterOptions, serve_router

        router_options = RouterOptions(models or [], host, port, api_key, cors, parallel, queue, max_models, keep_alive, load_timeout,
                                       quiet, json, not no_webui)
        return serve_router(context, router_options, answer, sampling, engine, weights, SessionFlags(session_disk=session_disk), screen,
                            slot_save_path)
    for flag_name, value in (("max_models", max_models), ("keep_alive", keep_alive), ("load_timeout", load_timeout)):
        if value is not None and is_typed(context, flag_name):
            raise UsageError(f"--{flag_name.replace('_', '-')} is for a server of several models",
                             "leave out MODEL to serve all local models")
    (model,) = models
    resolved = find_or_absent(model, screen, yes)
    session_flags = SessionFlags(session_disk=session_disk)
    check_flags(answer, sampling, engine, session_flags)
    from .server.http_server import bind_socket
    from .server.store_limits import ALL_STORES_NBYTES

    with bind_socket(host, port) as bound_socket:  # before the weights are read: a port in use is reported at once
        engine = resolve_draft(engine, screen)
        options = engine.options(overflow=answer.overflow, parallel=parallel, reserved_nbytes=ALL_STORES_NBYTES)
        if keep_prompts:
            from ..runtime.sessions.prompt_cache import refuse_inexact_cache

            refuse_inexact_cache(options)
        slots_folder = slot_folder(slot_save_path, options, screen)
        ref = pull_if_absent(resolved, weights, options, screen, yes)
        from ..runtime.encoders import is_encoder

        serves_encoder = is_encoder(ref.folder)
        shows_page = not no_webui and router_link is None and not serves_encoder
        server_options = ServerOptions(bound_socket, access_rules(bound_socket, host, api_key, cors, screen, shows_page),
                                       name or public_name(ref.text), accepted_names(name, router_link is not None, model, ref.text),
                                       queue, quiet, json, shows_page)
        if serves_encoder:
            from .serve_encoder import serve_encoder

            serve_encoder(context, ref, engine, server_options, screen)
            return 0
        slot_options = SlotOptions(parallel, session_flags, keep_prompts, slots_folder)
        with quantized_on_load(with_mmproj(ref, mmproj, screen), weights, screen, options) as quantized:
            serve_model(quantized, options, server_options, answer, sampling, slot_options, screen)
    return 0


@dataclass(frozen=True)
class ServerOptions:
    """Address, access rules and names of a served model."""

    listening: socket
    rules: AccessRules
    name: str  # in responses
    other_names: frozenset[str] | None  # further names in requests; None accepts any
    queue: int  # requests that may wait
    quiet: bool
    json: bool
    shows_page: bool = False  # serve the chat page


@dataclass(frozen=True)
class SlotOptions:
    """Parallel answers, and where their caches are saved."""

    parallel: int  # answers generated at once
    session_flags: SessionFlags
    keep_prompts: bool  # save prompt caches permanently, among the sessions
    slots_folder: Path | None  # where clients may save slots, None for nowhere


def serve_model(ref: ModelRef, options: EngineOptions, server_options: ServerOptions, answer: AnswerFlags, sampling: SamplingFlags,
                slot_options: SlotOptions, screen: Screen) -> None:
    """Serve a generative model until a signal."""
    from ..runtime.generation.scheduler import Scheduler
    from ..runtime.generation.served_model import ServedModel
    from .server.answer_queue import AnswerQueue
    from .server.application import GenerationService
    from .server.generation_options import Defaults
    from .server.guard import Guard
    from .server.http_server import GRACE_S, exit_now, serve_http

    parallel, session_flags = slot_options.parallel, slot_options.session_flags
    settings, constraint = sampling.settings(ref.folder, screen.note), answer.constraint()
    with ExitStack() as resources, open_model(ref, options, screen, with_media=True) as opened:
        default_generation = default_options(answer, settings, constraint, opened.tokenizer.thinks, screen)
        engines = parallel_engines(opened.engine, parallel, screen, resources)
        answer_queue = AnswerQueue(server_options.queue, parallel, Scheduler(opened.engine.batched_passes))
        prompt_cache = open_prompt_cache(opened.engine, ref, session_flags, slot_options.keep_prompts, screen, resources)
        served = ServedModel(opened.engine, opened.tokenizer, prompt_cache, engines[1:])
        service = GenerationService(served, answer_queue, server_options.name, screen.note_once, server_options.other_names,
                                    server_options.shows_page, defaults=Defaults(default_generation, answer.system),
                                    slot_files=slot_files(slot_options.slots_folder, opened.engine, ref, session_flags))
        context = service.served.n_ctx
        description = f"context {context} tokens" + (f" each, {parallel} answers at once" if parallel > 1 else "")
        ready = partial(report_ready, screen, server_options, description, context, opened.engine.placement.total_bytes, parallel)
        guard = Guard(service.application(), server_options.rules, partial(log_request, screen, server_options.quiet))
        serve_http(guard, server_options.listening, answer_queue, ready, screen.note_once)
        if not answer_queue.join(GRACE_S):
            resources.close()
            exit_now()


def default_options(answer: AnswerFlags, settings: SamplerSettings, constraint: Constraint | None, supports_reasoning: bool,
                    screen: Screen) -> GenerationOptions:
    """The options of answers whose request does not state them. A reasoning budget for a model without reasoning is dropped with a note."""
    from ..runtime.generation.served_model import GenerationOptions
    from ..runtime.tokenizer import NOTHING_TO_LIMIT
    from ..runtime.tokens.stream_filters import StopStrings

    think, max_reasoning_tokens = reasoning_options(answer, supports_reasoning)
    if max_reasoning_tokens is not None and not supports_reasoning:
        screen.note(NOTHING_TO_LIMIT)
        max_reasoning_tokens = None
    return GenerationOptions(settings, think, StopStrings(answer.stop or ()).stops, answer.max_tokens, constraint=constraint,
                             max_reasoning_tokens=max_reasoning_tokens)


def accepted_names(name: str | None, has_router: bool, *typed: str) -> frozenset[str] | None:
    """Further names of the model in requests. None accepts any: for a worker, whose router has resolved the name."""
    return None if has_router else frozenset() if name else frozenset(typed)


def access_rules(listening: socket, host: str, api_key: str | None, cors: list[str] | None, screen: Screen,
                 shows_page: bool) -> AccessRules:
    """The access rules of an address. Access from other machines without a key is noted."""
    from socket import gethostname

    from .server.guard import AccessRules, is_loopback
    from .server.page import is_page

    origins = tuple(each.rstrip("/") for each in cors or ())
    own_names = tuple(each.lower().rstrip(".") for each in (host, gethostname()))
    rules = AccessRules(is_loopback(listening.getsockname()[0]), api_key, origins, (is_page,) if shows_page else (), own_names)
    if not rules.on_loopback and api_key is None:
        screen.note(f"--host {host} without --api-key: anyone who reaches this machine can use it, and nothing is encrypted on the way")
    return rules


def report_ready(screen: Screen, server_options: ServerOptions, description: str, context: int, nbytes: int, parallel: int) -> None:
    """Report that the model is served: to the router, else to the user."""
    if (router_link := screen.environment.router_link) is not None:
        router_link.report_listening(server_options.listening.getsockname()[1], context, nbytes, parallel)
        return
    from .server.http_server import url_of

    url = url_of(server_options.listening)
    screen.note(f"{url} serves {server_options.name}, {description}; Ctrl-C stops it")
    note_page(screen, url, server_options.shows_page)
    if server_options.json:
        screen.json({"url": url, "model": server_options.name, "context": context, "parallel": parallel})
    start_log(screen)


def start_log(screen: Screen) -> None:
    """Timestamp notes from now on, unless they go to the system's journal, which adds its own timestamps."""
    screen.is_log = True
    with suppress(OSError, ValueError):  # a stream without a descriptor, as in tests
        status = os.fstat(screen.environment.stderr.fileno())
        screen.is_log = screen.environment.variables.get("JOURNAL_STREAM") != f"{status.st_dev}:{status.st_ino}"


def note_page(screen: Screen, url: str, is_shown: bool) -> None:
    if is_shown:
        screen.note(f"{url.removesuffix('v1')} is the chat page")


def log_request(screen: Screen, quiet: bool, method: str, path: str, status: int, record: RequestRecord) -> None:
    """Write the log line of a request; `quiet` omits successful ones. Files of the chat page and polls of background responses are not
    logged, nor are requests that a worker logs."""
    if record.is_unlogged or record.is_proxied:
        return
    results = [text for text in (record.stats and format_cost(record.stats), record.summary) if text]
    parts = [f"{method} {truncate(path, MAX_PATH)} {status}", *(f"{text}, {format_elapsed(record.seconds)}" for text in results)]
    parts += [truncate(text, MAX_REASON) for text in (record.end_reason, record.problem) if text]
    if record.problem or not quiet:
        screen.note(" · ".join(parts))


def format_elapsed(seconds: float) -> str:
    return f"{rounded(seconds, 2)} s" if seconds < 60 else duration(seconds)


def format_cost(stats: Stats) -> str:
    """`57 tokens in (40 cached), 120 tokens out, 35 tokens/s`"""
    cached = f" ({stats.cached_tokens} cached)" if stats.cached_tokens else ""
    rate = f", {rounded(stats.decode_tps)} tokens/s" if stats.decode_tps else ""
    return f"{format_token_count(stats.prompt_tokens)} in{cached}, {format_token_count(len(stats.token_ids))} out{rate}"


def check_server_flags(api_key: str | None, name: str | None, cors: list[str] | None, queue: int) -> None:
    """Raises UsageError for invalid flags of this command."""
    if api_key is not None and (not api_key.isascii() or not api_key.isprintable() or not api_key.strip() or " " in api_key):
        raise UsageError("--api-key is not a valid key: use ASCII letters, digits and punctuation, no spaces", "leave it out for no key")
    if name is not None and (not name.strip() or not name.isprintable()):
        raise UsageError("--name is empty", "leave it out to use the name MODEL")
    if invalid := next((origin for origin in cors or () if origin != "*" and not is_origin(origin)), None):
        raise UsageError(f"--cors {invalid} is not an origin", "such as https://chat.example:8443, without a path; * for every page")
    if queue < 0:
        raise UsageError(f"--queue {queue} is out of range", "the number of requests that may wait: 0 or more")


def is_origin(text: str) -> bool:
    """Whether a text is an origin: a scheme and a host. Desktop apps have schemes of their own."""
    try:
        return "://" in text and (text.startswith("file:") or urlsplit(text).hostname is not None)
    except ValueError:  # an unclosed bracket of an IPv6 address
        return False


def parallel_engines(engine: Engine, sequences: int, screen: Screen, resources: ExitStack) -> list[Engine]:
    """The engines for parallel answers. `resources`: closes their caches."""
    from ..runtime.generation.batching import open_sequences

    engines, notes = open_sequences(engine, sequences)
    for other in engines[1:]:
        resources.callback(other.cache.close)
    for line in notes:
        screen.note(line)
    return engines


def open_prompt_cache(engine: Engine, ref: ModelRef, flags: SessionFlags, permanent: bool, screen: Screen,
                 resources: ExitStack) -> PromptCache | None:
    """The store of prompt caches that other answers displace: a temporary folder, removed by `resources`, or if `permanent` the folder of
    the sessions. None if it is turned off, or not possible with the engine's options."""
    from ..runtime.files.scratch_folder import scratch_folder
    from ..runtime.library.storage import served_folder
    from ..runtime.sessions.prompt_cache import PromptCache, conflicting_flag
    from ..runtime.sessions.saved_sessions import SavedSessions
    from ..runtime.sessions.session_store import SessionStore

    sessions = SessionSaver(screen, ref, flags).sessions
    if permanent:
        return PromptCache(engine, sessions)
    if not sessions.budget or conflicting_flag(engine.options):
        return None
    parent = served_folder(screen.environment.variables)
    try:
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = resources.enter_context(scratch_folder(parent))
    except OSError as error:
        screen.note(f"KV caches of inactive conversations cannot be saved: {error.filename}: {error.strerror}")
        return None
    return PromptCache(engine, SavedSessions(SessionStore(folder, lasting=False), ref.text, sessions.budget),
                       f"KV caches of inactive conversations are kept in {folder} until the server ends (--session-disk 0 turns this off)")


def slot_folder(text: str | None, options: EngineOptions, screen: Screen) -> Path | None:
    """The folder of --slot-save-path, None if it was not given; a new one is noted. Raises what `slot_files.slot_folder` raises."""
    if text is None:
        return None
    from ..runtime.sessions import slot_files

    is_new = not os.path.exists(os.path.expanduser(text))
    folder = slot_files.slot_folder(text, options)
    if is_new:
        screen.note(f"{folder} is a new folder, for slots that are saved")
    return folder


def slot_files(folder: Path | None, engine: Engine, ref: ModelRef, flags: SessionFlags) -> SlotFiles | None:
    """The object that saves and restores slots in a folder; None without one."""
    if folder is None:
        return None
    from ..offload.size import parse_size
    from ..runtime.sessions.session_store import DEFAULT_BUDGET
    from ..runtime.sessions.slot_files import SlotFiles

    return SlotFiles(folder, ref.text, parse_size(flags.session_disk or DEFAULT_BUDGET), engine.adapter_scales)


def public_name(text: str) -> str:
    """A model's name in responses: of a path only the last part, and for a link its own name, not its target's."""
    path = Path(text).expanduser()
    return os.path.basename(os.path.abspath(path)) if text.startswith((".", "/", "~")) or os.path.exists(path) else text
