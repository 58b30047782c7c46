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
from .loading import at_precision, check_flags, find_or_absent, open_session, pull_if_absent, terminal_stream, with_draft, with_mmproj
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
from .tools import offered_tools, refuse_raw_tools

if TYPE_CHECKING:
    from ..runtime.catalog import ModelRef
    from .media_files import MediaFile
    from .tools import ToolUse

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


def run(context: typer.Context, model: AnyModel = None, prompt: Prompt = None, file: File = None, *, shown: MediaFlags, raw: Raw = False,
        ignore_eos: IgnoreEos = False, answer: AnswerFlags, sampling: SamplingFlags, engine: RunFlags, mmproj: Mmproj = None,
        weights: WeightFlags, saving: SessionFlags, tools: ToolFlags, show: ShowFlags, json: Json = False, yes: Yes = False) -> int:
    """Write one answer to stdout; without a prompt, chat."""
    screen = Screen(context.obj, show.markdown)
    model = model or offer_default(screen, yes)
    if prompt is None and file is None and screen.environment.is_terminal(screen.environment.stdin):  # a chat
        raw, ignore_eos = (asked and without_prompt(context, name, screen) for name, asked in (("raw", raw), ("ignore_eos", ignore_eos)))
    if raw and not is_typed(context, "raw"):
        raw = holds(answer, saving, screen)
    refuse_raw_media(raw, shown)
    refuse_raw_tools(raw, tools)
    if raw:
        answer, saving = beside_raw(answer, saving, screen)
    try:
        found = find_or_absent(model, screen, yes)
    except ModelNotFound as error:
        if prompt is not None and type(error) is ModelNotFound and is_model(prompt, screen.environment.variables):
            error.hint = f"the model comes first, then the prompt: effllm run {typed(prompt)} {typed(model)}"
        raise
    check_flags(answer, sampling, engine, saving)
    note_seed_flag(answer, screen)
    text = read_prompt(prompt, file, screen, bool(shown.named))
    if text is None and (json or raw or ignore_eos):
        raise UsageError("no prompt", f'effllm run {typed(model)} "your prompt"')
    if text is not None:
        screen.environment.require_stdout()
    else:
        terminal_stream(screen, model)
    engine = with_draft(engine, screen)
    options = engine.options(overflow=answer.overflow)
    here = with_mmproj(pull_if_absent(found, weights, options, screen, yes), mmproj, screen)
    pictures = read_media(shown, here, screen)
    with at_precision(here, weights, screen, options) as ref, offered_tools(replace(tools, mcp=None) if raw else tools, ref, engine,
                                                                            screen) as use:
        if text is not None:
            return answer_once(screen, ref, text, answer, sampling, engine, saving, raw=raw, ignore_eos=ignore_eos, show=show,
                               json=json, pictures=pictures, tools=use)
        from .chat import converse

        return converse(screen, ref, answer, sampling, engine, saving, show, pictures, use)


def without_prompt(context: typer.Context, name: str, screen: Screen) -> bool:
    """Whether a one-shot flag applies to a chat: ignored if it comes from a variable."""
    if is_typed(context, name):
        return True
    key = name.replace("_", "-")
    screen.note(f"no prompt, so this is a chat: {key} of {origin(screen.environment, key)} is ignored")
    return False


def holds(answer: AnswerFlags, saving: SessionFlags, screen: Screen) -> bool:
    """Whether a --raw from a variable applies: it is ignored with a note beside typed flags that contradict it."""
    typed = [f"--{key}" for key, flags in (("system", answer), ("session", saving))
             if getattr(flags, key) is not None and key not in flags.settled]
    if typed:
        were = "was" if len(typed) == 1 else "were"
        screen.note(f"{' and '.join(typed)} {were} typed: raw of {origin(screen.environment, 'raw')} is ignored")
    return not typed


def beside_raw(answer: AnswerFlags, saving: SessionFlags, screen: Screen) -> tuple[AnswerFlags, SessionFlags]:
    """The flags that work with --raw: a system prompt or session from settings is ignored. Raises UsageError for typed ones."""
    left = []
    if answer.system is not None:
        if "system" not in answer.settled:
            raise UsageError("--system cannot be combined with --raw", "drop one of them, or write the system prompt into the text")
        left.append("system")
    if saving.session is not None:
        if "session" not in saving.settled:
            raise UsageError("--session keeps a conversation, and --raw text is not one", "drop one of them")
        left.append("session")
    for key in left:
        screen.note(f"--raw: {key} of {origin(screen.environment, key)} is ignored")
    return replace(answer, system=None), replace(saving, session=None)


def answer_once(screen: Screen, ref: ModelRef, text: str, answer: AnswerFlags, sampling: SamplingFlags, engine: RunFlags,
                saving: SessionFlags, *, show: ShowFlags, raw: bool = False, ignore_eos: bool = False, json: bool = False,
                pictures: Sequence[MediaFile] = (), tools: ToolUse | None = None) -> int:
    from .answer import say_cost, say_ending, show_answer

    keeper = None
    if saving.session is not None:
        from .saving import SessionSaver

        keeper = SessionSaver(screen, ref, saving, engine.strict)
    sees = bool(pictures) or keeper is not None or tools is not None
    with open_session(ref, answer, sampling, engine, screen, raw=raw, ignore_eos=ignore_eos, sees=sees) as session:
        session.from_process_start = True
        if keeper:
            keeper.begin(session)
        if tools:
            tools.begin(session)
        try:
            about = [piece for each in as_media_items(pictures, session) for piece in each.shown]
            events = session.complete(text) if raw else session.ask(text, about)
            show_part = partial(show_answer, session=session, screen=screen, silent=json)
            cost = tools.answer(events, session, show_part) if tools else show_part(events)
            if json:
                screen.json(cost.to_json() | ({"calls": tools.calls} if tools else {}))
            say_ending(cost, session, screen)
            if show.stats:
                say_cost(cost, session, screen)
        except (OutputClosed, OutputFailed):
            if not termination_signal():  # else nobody reads any more, and what was said is kept
                raise
        if keeper:
            keeper.keep(session)
        exit_if_terminated()
    if cost.finish_reason == "cancelled" or tools and tools.was_stopped:
        return INTERRUPTED
    return INCOMPLETE if cost.is_whole is False and session.max_tokens != 0 else 0  # with -n 0 no answer was wanted


def offer_default(screen: Screen, yes: bool) -> str:
    """The packaged model, if the user (or -y) agrees."""
    offer = f"no model was named; {DEFAULT_MODEL} is packaged with effllm and works offline"
    if yes or (screen.environment.is_interactive and screen.confirm(f"{offer[0].upper()}{offer[1:]}. Use it?")):
        return DEFAULT_MODEL
    raise UsageError(offer, f"effllm run {DEFAULT_MODEL}")
