"""`effllm run`: one answer. Without a prompt, at a terminal, it starts a chat; without a model it offers the packaged one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from .. import ModelNotFound, UsageError, typed
from .environment import OutputClosed, OutputFailed
from .errors import INCOMPLETE, INTERRUPTED
from .flags import add_command, flag, is_typed
from .interrupt import exit_if_terminated, termination_signal
from .loading import (
    check_flags,
    find_or_absent,
    open_session,
    pull_if_absent,
    quantized_on_load,
    resolve_draft,
    terminal_stream,
    with_mmproj,
)
from .media_files import MediaFlags, as_media_items, read_media, refuse_raw_media
from .migration_hints import is_model, note_seed_flag
from .options import (
    ANSWER,
    AnswerFlags,
    AnyModel,
    Json,
    Mmproj,
    RunFlags,
    SamplingFlags,
    SessionFlags,
    ShowFlags,
    ToolFlags,
    WeightFlags,
    Yes,
)
from .prompt import read_prompt
from .screen import Screen
from .settings import origin
from .tools import open_tools, refuse_raw_tools

if TYPE_CHECKING:
    from ..runtime.catalog import ModelRef
    from .media_files import MediaFile
    from .tools import ToolSession

DEFAULT_MODEL = "fable"
EXAMPLES = """examples

  effllm run fable "Tell me a story about the fox and the king."
  cat letter.txt | effllm run fable "Answer this letter." > reply.txt
  effllm run fable --raw "Once upon a time" -n 40 --temp 0 --stats
"""

Prompt = Annotated[str | None, typer.Argument(metavar="PROMPT", show_default=False,
                                              help="the prompt; text from standard input goes before it")]
File = Annotated[str | None, flag(ANSWER, "-f --file", "FILE", "read the prompt from a file, - is standard input; PROMPT goes after it")]
Raw = Annotated[bool, flag(ANSWER, "--raw", "", "continue the text as it is, without the chat template")]
IgnoreEos = Annotated[bool, flag(ANSWER, "--ignore-eos", "", "keep generating past the model's end of text, up to -n or the context")]


def register(app: typer.Typer) -> None:
    add_command(app, "run", "run a model", run, EXAMPLES)


def run(context: typer.Context, model: AnyModel = None, prompt: Prompt = None, file: File = None, *, media_flags: MediaFlags,
        raw: Raw = False, ignore_eos: IgnoreEos = False, answer: AnswerFlags, sampling: SamplingFlags, engine: RunFlags,
        mmproj: Mmproj = None, weights: WeightFlags, saving: SessionFlags, tools: ToolFlags, display: ShowFlags, json: Json = False,
        yes: Yes = False) -> int:
    """Write one answer to stdout; without a prompt, chat."""
    screen = Screen(context.obj, display.markdown)
    model = model or offer_default(screen, yes)
    if prompt is None and file is None and screen.environment.is_terminal(screen.environment.stdin):  # a chat
        raw, ignore_eos = (value and applies_to_chat(context, name, screen) for name, value in (("raw", raw), ("ignore_eos", ignore_eos)))
    if raw and not is_typed(context, "raw"):
        raw = raw_applies(answer, saving, screen)
    refuse_raw_media(raw, media_flags)
    refuse_raw_tools(raw, tools)
    if raw:
        answer, saving = flags_for_raw(answer, saving, screen)
    try:
        resolved = find_or_absent(model, screen, yes)
    except ModelNotFound as error:
        if prompt is not None and type(error) is ModelNotFound and is_model(prompt, screen.environment.variables):
            error.hint = f"the model comes first, then the prompt: effllm run {typed(prompt)} {typed(model)}"
        raise
    check_flags(answer, sampling, engine, saving)
    note_seed_flag(answer, screen)
    prompt_text = read_prompt(prompt, file, screen, bool(media_flags.named))
    if prompt_text is None and (json or raw or ignore_eos):
        raise UsageError("no prompt", f'effllm run {typed(model)} "your prompt"')
    if prompt_text is not None:
        screen.environment.require_stdout()
    else:
        terminal_stream(screen, model)
    engine = resolve_draft(engine, screen)
    options = engine.options(overflow=answer.overflow)
    ref = with_mmproj(pull_if_absent(resolved, weights, options, screen, yes), mmproj, screen)
    media = read_media(media_flags, ref, screen)
    if raw:
        tools = replace(tools, mcp=None)
    with quantized_on_load(ref, weights, screen, options) as ref, open_tools(tools, ref, engine, screen) as session_tools:
        if prompt_text is not None:
            return answer_once(screen, ref, prompt_text, answer, sampling, engine, saving, raw=raw, ignore_eos=ignore_eos, display=display,
                               json=json, media=media, tools=session_tools)
        from .chat import converse

        return converse(screen, ref, answer, sampling, engine, saving, display, media, session_tools)


def applies_to_chat(context: typer.Context, name: str, screen: Screen) -> bool:
    """Whether a one-shot flag that is set applies although there is no prompt. If it comes from a variable, it is ignored with a note."""
    if is_typed(context, name):
        return True
    key = name.replace("_", "-")
    screen.note(f"no prompt, so this is a chat: {key} of {origin(screen.environment, key)} is ignored")
    return False


def raw_applies(answer: AnswerFlags, saving: SessionFlags, screen: Screen) -> bool:
    """Whether a --raw from a variable applies. If a typed flag contradicts it, it is ignored with a note."""
    typed = [f"--{key}" for key, flags in (("system", answer), ("session", saving))
             if getattr(flags, key) is not None and key not in flags.from_settings]
    if typed:
        verb = "was" if len(typed) == 1 else "were"
        screen.note(f"{' and '.join(typed)} {verb} typed: raw of {origin(screen.environment, 'raw')} is ignored")
    return not typed


def flags_for_raw(answer: AnswerFlags, saving: SessionFlags, screen: Screen) -> tuple[AnswerFlags, SessionFlags]:
    """The flags that work with --raw: a system prompt or session from settings is ignored. Raises UsageError for typed ones."""
    ignored = []
    if answer.system is not None:
        if "system" not in answer.from_settings:
            raise UsageError("--system cannot be combined with --raw", "drop one of them, or write the system prompt into the text")
        ignored.append("system")
    if saving.session is not None:
        if "session" not in saving.from_settings:
            raise UsageError("--session keeps a conversation, and --raw text is not one", "drop one of them")
        ignored.append("session")
    for key in ignored:
        screen.note(f"--raw: {key} of {origin(screen.environment, key)} is ignored")
    return replace(answer, system=None), replace(saving, session=None)


def answer_once(screen: Screen, ref: ModelRef, text: str, answer: AnswerFlags, sampling: SamplingFlags, engine: RunFlags,
                saving: SessionFlags, *, display: ShowFlags, raw: bool = False, ignore_eos: bool = False, json: bool = False,
                media: Sequence[MediaFile] = (), tools: ToolSession | None = None) -> int:
    """Answer one prompt, or continue it with `raw`; returns the exit code."""
    from .answer import print_finish_reason, print_stats, show_answer

    saver = None
    if saving.session is not None:
        from .saving import SessionSaver

        saver = SessionSaver(screen, ref, saving, engine.strict)
    with_media = bool(media) or saver is not None or tools is not None
    with open_session(ref, answer, sampling, engine, screen, raw=raw, ignore_eos=ignore_eos, with_media=with_media) as session:
        session.from_process_start = True
        if saver:
            saver.begin(session)
        if tools:
            tools.begin(session)
        try:
            attachments = [item for attachment in as_media_items(media, session) for item in attachment.media]
            events = session.complete(text) if raw else session.ask(text, attachments)
            show_events = partial(show_answer, session=session, screen=screen, silent=json)
            stats = tools.answer(events, session, show_events) if tools else show_events(events)
            if json:
                screen.json(stats.to_json() | ({"calls": tools.calls} if tools else {}))
            print_finish_reason(stats, session, screen)
            if display.stats:
                print_stats(stats, session, screen)
        except (OutputClosed, OutputFailed):
            if not termination_signal():  # after a signal nobody reads any more, and the session is still saved
                raise
        if saver:
            saver.keep(session)
        exit_if_terminated()
    if stats.finish_reason == "cancelled" or tools and tools.was_stopped:
        return INTERRUPTED
    return INCOMPLETE if stats.is_whole is False and session.max_tokens != 0 else 0  # with -n 0 no answer was requested


def offer_default(screen: Screen, yes: bool) -> str:
    """The packaged model, if the user (or -y) agrees."""
    offer = f"no model was named; {DEFAULT_MODEL} is packaged with effllm and works offline"
    if yes or (screen.environment.is_interactive and screen.confirm(f"{offer[0].upper()}{offer[1:]}. Use it?")):
        return DEFAULT_MODEL
    raise UsageError(offer, f"effllm run {DEFAULT_MODEL}")
