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
from .answer import counted
from .flags import add_command, flag, is_typed
from .loading import at_precision, check_flags, find_or_absent, loaded, pull_if_absent, reasoning_options, with_draft, with_mmproj
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
MOST_SHOWN, MOST_SAID = 100, 200  # columns of a path, and of why a request was refused
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

        served = RouterOptions(models or [], host, port, api_key, cors, parallel, queue, max_models, keep_alive, load_timeout, quiet, json,
                               not no_webui)
        return serve_router(context, served, answer, sampling, engine, weights, SessionFlags(session_disk=session_disk), screen,
                            slot_save_path)
    for given, value in (("max_models", max_models), ("keep_alive", keep_alive), ("load_timeout", load_timeout)):
        if value is not None and is_typed(context, given):
            raise UsageError(f"--{given.replace('_', '-')} is for a server of several models", "leave out MODEL to serve all local models")
    (model,) = models
    found = find_or_absent(model, screen, yes)
    keeping = SessionFlags(session_disk=session_disk)
    check_flags(answer, sampling, engine, keeping)
    from .server.http_server import bind_socket
    from .server.store_limits import ALL_STORES_NBYTES

    with bind_socket(host, port) as listening:  # before the weights are read: a port in use is reported at once
        engine = with_draft(engine, screen)
        options = engine.options(overflow=answer.overflow, parallel=parallel, reserved_nbytes=ALL_STORES_NBYTES)
        if keep_prompts:
            from ..runtime.sessions.prompt_cache import refuse_inexact_cache

            refuse_inexact_cache(options)
        slots_in = slot_folder(slot_save_path, options, screen)
        ref = pull_if_absent(found, weights, options, screen, yes)
        from ..runtime.encoders import is_encoder

        if is_encoder(ref.folder):
            from .serve_encoder import serve_encoder

            serve_encoder(context, ref, engine, ServerOptions(listening, access_rules(listening, host, api_key, cors, screen, False),
                                                              name or public_name(ref.text),
                                                              accepted_names(name, router_link is not None, model, ref.text),
                                                              queue, quiet, json), screen)
            return 0
        with at_precision(with_mmproj(ref, mmproj, screen), weights, screen, options) as ref:
            shows_page = not no_webui and router_link is None
            place = ServerOptions(listening, access_rules(listening, host, api_key, cors, screen, shows_page),
                                  name or public_name(ref.text),
                                  accepted_names(name, router_link is not None, model, ref.text), queue, quiet, json, shows_page)
            serve_model(ref, options, place, answer, sampling, SlotOptions(parallel, keeping, keep_prompts, slots_in), screen)
    return 0


@dataclass(frozen=True)
class ServerOptions:
    """Address, access rules and names of a served model."""

    listening: socket
    rules: AccessRules
    name: str
    also: frozenset[str] | None
    queue: int
    quiet: bool
    json: bool
    shows_page: bool = False


@dataclass(frozen=True)
class SlotOptions:
    """How many answers are generated at once, and where prompt caches are kept: `for_good` among the sessions, and in a folder of slots."""

    parallel: int
    keeping: SessionFlags
    for_good: bool
    slots: Path | None


def serve_model(ref: ModelRef, options: EngineOptions, place: ServerOptions, answer: AnswerFlags, sampling: SamplingFlags,
                sequences: SlotOptions,
                screen: Screen) -> None:
    """Serve until a signal."""
    from ..runtime.generation.scheduler import Scheduler
    from ..runtime.generation.served_model import ServedModel
    from .server.answer_queue import AnswerQueue
    from .server.application import GenerationService
    from .server.generation_options import Defaults
    from .server.guard import Guard
    from .server.http_server import GRACE_S, exit_now, serve_http

    parallel, keeping = sequences.parallel, sequences.keeping
    settings, constraint = sampling.settings(ref.folder, screen.note), answer.constraint()
    with ExitStack() as lasting, loaded(ref, options, screen, sees=True) as opened:
        wish = default_options(answer, settings, constraint, opened.tokenizer.thinks, screen)
        engines = parallel_engines(opened.engine, parallel, screen, lasting)
        answer_queue = AnswerQueue(place.queue, parallel, Scheduler(opened.engine.batched_passes))
        kept = kept_prompts(opened.engine, ref, keeping, sequences.for_good, screen, lasting)
        service = GenerationService(ServedModel(opened.engine, opened.tokenizer, kept, engines[1:]), answer_queue, place.name,
                                    screen.note_once, place.also, place.shows_page, defaults=Defaults(wish, answer.system),
                                    slot_files=slot_files(sequences.slots, opened.engine, ref, keeping))
        context = service.served.n_ctx
        does = f"context {context} tokens" + (f" each, {parallel} answers at once" if parallel > 1 else "")
        ready = partial(say_ready, screen, place, does, context, opened.engine.placement.total_bytes, parallel)
        serve_http(Guard(service.application(), place.rules, partial(say_request, screen, place.quiet)), place.listening, answer_queue,
                   ready, screen.note_once)
        if not answer_queue.join(GRACE_S):
            lasting.close()
            exit_now()


def default_options(answer: AnswerFlags, settings: SamplerSettings, constraint: Constraint | None, thinks: bool,
                    screen: Screen) -> GenerationOptions:
    """The options of answers whose request does not state them. A reasoning budget for a model without reasoning is reported once."""
    from ..runtime.generation.served_model import GenerationOptions
    from ..runtime.tokenizer import NOTHING_TO_LIMIT
    from ..runtime.tokens.stream_filters import StopStrings

    think, most = reasoning_options(answer, thinks)
    if most is not None and not thinks:
        screen.note(NOTHING_TO_LIMIT)
        most = None
    return GenerationOptions(settings, think, StopStrings(answer.stop or ()).stops, answer.max_tokens, constraint=constraint,
                             max_reasoning_tokens=most)


def accepted_names(name: str | None, has_router: bool, *typed: str) -> frozenset[str] | None:
    """Further names of the model in requests; None for any, behind a router, which has resolved the name."""
    return None if has_router else frozenset() if name else frozenset(typed)


def access_rules(listening: socket, host: str, api_key: str | None, cors: list[str] | None, screen: Screen,
                 shows_page: bool) -> AccessRules:
    """The access rules of an address; open access is reported."""
    from .server.guard import AccessRules, is_loopback
    from .server.page import is_page

    origins = tuple(each.rstrip("/") for each in cors or ())
    rules = AccessRules(is_loopback(listening.getsockname()[0]), api_key, origins, (is_page,) if shows_page else ())
    if not rules.on_loopback and api_key is None:
        screen.note(f"--host {host} without --api-key: anyone who reaches this machine can use it, and nothing is encrypted on the way")
    return rules


def say_ready(screen: Screen, place: ServerOptions, does: str, context: int, nbytes: int, parallel: int) -> None:
    """Report that the model is served: to the router, else to the user."""
    if (router_link := screen.environment.router_link) is not None:
        router_link.report_listening(place.listening.getsockname()[1], context, nbytes, parallel)
        return
    from .server.http_server import url_of

    url = url_of(place.listening)
    screen.note(f"{url} serves {place.name}, {does}; Ctrl-C stops it")
    say_page(screen, url, place.shows_page)
    if place.json:
        screen.json({"url": url, "model": place.name, "context": context, "parallel": parallel})
    start_log(screen)


def start_log(screen: Screen) -> None:
    """Timestamp lines from now on, unless they go to the system's journal, which adds its own."""
    screen.is_log = True
    with suppress(OSError, ValueError):  # such as a stream of a test, which has no descriptor
        status = os.fstat(screen.environment.stderr.fileno())
        screen.is_log = screen.environment.variables.get("JOURNAL_STREAM") != f"{status.st_dev}:{status.st_ino}"


def say_page(screen: Screen, url: str, is_shown: bool) -> None:
    if is_shown:
        screen.note(f"{url.removesuffix('v1')} is the chat page")


def say_request(screen: Screen, quiet: bool, method: str, path: str, status: int, record: RequestRecord) -> None:
    """The log line of a request; `quiet` omits successful ones. Files of the chat page have none, nor do requests that a worker logs."""
    if record.is_minor or record.passed_on:
        return
    did = [each for each in (record.stats and cost(record.stats), record.outcome) if each]
    parts = [f"{method} {truncate(path, MOST_SHOWN)} {status}", *(f"{each}, {format_elapsed(record.seconds)}" for each in did)]
    parts += [truncate(each, MOST_SAID) for each in (record.ending, record.problem) if each]
    if record.problem or not quiet:
        screen.note(" · ".join(parts))


def format_elapsed(seconds: float) -> str:
    return f"{rounded(seconds, 2)} s" if seconds < 60 else duration(seconds)


def cost(stats: Stats) -> str:
    """`57 tokens in (40 cached), 120 tokens out, 35 tokens/s`"""
    cached = f" ({stats.cached_tokens} cached)" if stats.cached_tokens else ""
    rate = f", {rounded(stats.decode_tps)} tokens/s" if stats.decode_tps else ""
    return f"{counted(stats.prompt_tokens)} in{cached}, {counted(len(stats.token_ids))} out{rate}"


def check_server_flags(api_key: str | None, name: str | None, cors: list[str] | None, queue: int) -> None:
    """Raises UsageError for invalid flags of this command."""
    if api_key is not None and (not api_key.isascii() or not api_key.isprintable() or not api_key.strip() or " " in api_key):
        raise UsageError("--api-key is not a valid key: use ASCII letters, digits and punctuation, no spaces", "leave it out for no key")
    if name is not None and (not name.strip() or not name.isprintable()):
        raise UsageError("--name is empty", "leave it out to use the name MODEL")
    if wrong := next((each for each in cors or () if each != "*" and not is_origin(each)), None):
        raise UsageError(f"--cors {wrong} is not an origin", "such as https://chat.example:8443, without a path; * for every page")
    if queue < 0:
        raise UsageError(f"--queue {queue} is out of range", "the number of requests that may wait: 0 or more")


def is_origin(text: str) -> bool:
    """Whether it has a scheme and a host; desktop apps have origins with schemes of their own."""
    try:
        return "://" in text and (text.startswith("file:") or urlsplit(text).hostname is not None)
    except ValueError:  # half of an address in brackets
        return False


def parallel_engines(engine: Engine, sequences: int, screen: Screen, lasting: ExitStack) -> list[Engine]:
    """The engines for parallel answers, whose caches end with `lasting`."""
    from ..runtime.generation.batching import open_sequences

    engines, said = open_sequences(engine, sequences)
    for other in engines[1:]:
        lasting.callback(other.cache.close)
    for line in said:
        screen.note(line)
    return engines


def kept_prompts(engine: Engine, ref: ModelRef, flags: SessionFlags, for_good: bool, screen: Screen,
                 lasting: ExitStack) -> PromptCache | None:
    """The store of prompt caches that other answers displace: in a folder that ends with `lasting`, or `for_good` among the sessions. None
    if nothing is to be kept, or can be."""
    from ..runtime.files.scratch_folder import scratch_folder
    from ..runtime.library.storage import served_folder
    from ..runtime.sessions.prompt_cache import PromptCache, conflicting_flag
    from ..runtime.sessions.saved_sessions import SavedSessions
    from ..runtime.sessions.session_store import SessionStore

    sessions = SessionSaver(screen, ref, flags).sessions
    if for_good:
        return PromptCache(engine, sessions)
    if not sessions.budget or conflicting_flag(engine.options):
        return None
    parent = served_folder(screen.environment.variables)
    try:
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = lasting.enter_context(scratch_folder(parent))
    except OSError as error:
        screen.note(f"KV caches of inactive conversations cannot be saved: {error.filename}: {error.strerror}")
        return None
    return PromptCache(engine, SavedSessions(SessionStore(folder, lasting=False), ref.text, sessions.budget),
                       f"KV caches of inactive conversations are kept in {folder} until the server ends (--session-disk 0 turns this off)")


def slot_folder(text: str | None, options: EngineOptions, screen: Screen) -> Path | None:
    """The folder of --slot-save-path, checked; a new one is reported. Raises what `slot_files.slot_folder` raises."""
    if text is None:
        return None
    from ..runtime.sessions import slot_files

    is_new = not os.path.exists(os.path.expanduser(text))
    folder = slot_files.slot_folder(text, options)
    if is_new:
        screen.note(f"{folder} is a new folder, for slots that are saved")
    return folder


def slot_files(folder: Path | None, engine: Engine, ref: ModelRef, flags: SessionFlags) -> SlotFiles | None:
    """Saves and restores slots in a folder."""
    if folder is None:
        return None
    from ..offload.size import parse_size
    from ..runtime.sessions.session_store import DISK
    from ..runtime.sessions.slot_files import SlotFiles

    return SlotFiles(folder, ref.text, parse_size(flags.session_disk or DISK), engine.adapter_scales)


def public_name(text: str) -> str:
    """A model's name in responses: no folder of this machine, and for a link its own name, not its target's."""
    path = Path(text).expanduser()
    return os.path.basename(os.path.abspath(path)) if text.startswith((".", "/", "~")) or os.path.exists(path) else text
