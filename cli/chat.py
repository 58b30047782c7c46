"""`effllm chat`: the command. The chat loop is in conversation.py, which only a terminal needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from .flags import add_command
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
from .media_files import as_media_items
from .migration_hints import note_seed_flag
from .options import (
    AnswerFlags,
    Mmproj,
    Model,
    RunFlags,
    SamplingFlags,
    SessionFlags,
    ShowFlags,
    ToolFlags,
    WeightFlags,
    Yes,
    require_answer_tokens,
)
from .prompt import read_prompt
from .screen import Screen
from .tools import open_tools

if TYPE_CHECKING:
    from ..runtime.catalog import ModelRef
    from .media_files import MediaFile
    from .tools import ToolSession

EXAMPLES = """examples

  effllm chat fable
  effllm chat ./my-model -s "Answer in one sentence." --temp 0.3

In the chat, /help lists the commands. Ctrl-C stops an answer and keeps its text so far, a second one quits, as does Ctrl-D.
"""


def register(app: typer.Typer) -> None:
    add_command(app, "chat", "run a model", chat, EXAMPLES)


def chat(context: typer.Context, model: Model, answer: AnswerFlags, sampling: SamplingFlags, engine: RunFlags, weights: WeightFlags,
         saving: SessionFlags, tools: ToolFlags, display: ShowFlags, mmproj: Mmproj = None, yes: Yes = False) -> int:
    """Chat in the terminal. Piped text gets one answer, as with `run`."""
    from .run import answer_once

    screen = Screen(context.obj, display.markdown)
    resolved = find_or_absent(model, screen, yes)
    check_flags(answer, sampling, engine, saving)
    note_seed_flag(answer, screen)
    text = None if screen.environment.is_terminal(screen.environment.stdin) else read_prompt(None, "-", screen)
    if text is not None:
        screen.environment.require_stdout()
    else:
        terminal_stream(screen, model)
        require_answer_tokens(answer.max_tokens, "leave out -n, or for a prompt that is only read: effllm run MODEL PROMPT -n 0")
    engine = resolve_draft(engine, screen)
    options = engine.options(overflow=answer.overflow)
    ref = with_mmproj(pull_if_absent(resolved, weights, options, screen, yes), mmproj, screen)
    with quantized_on_load(ref, weights, screen, options) as ref, open_tools(tools, ref, engine, screen) as session_tools:
        if text is not None:
            return answer_once(screen, ref, text, answer, sampling, engine, saving, display=display, tools=session_tools)
        return converse(screen, ref, answer, sampling, engine, saving, display, tools=session_tools)


def converse(screen: Screen, ref: ModelRef, answer: AnswerFlags, sampling: SamplingFlags, engine: RunFlags, saving: SessionFlags,
             display: ShowFlags, media: Sequence[MediaFile] = (), tools: ToolSession | None = None) -> int:
    """Chat at the terminal; returns the exit code. `media`: files to send with the first message."""
    visible = terminal_stream(screen, ref.text)
    from .conversation import Conversation
    from .saving import SessionSaver

    saver = SessionSaver(screen, ref, saving, engine.strict)
    with open_session(ref, answer, sampling, engine, screen) as session:
        saver.begin(session)
        if tools:
            tools.begin(session)
            tools.announce(session)
        code = Conversation(ref.text, session, screen, visible, display.stats, saver, as_media_items(media, session), tools).run()
        saver.keep(session)
        return code
