"""`effllm chat`: the command. The chat loop is in conversation.py, which only a terminal needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from .flags import add_command
from .loading import at_precision, check_flags, find_or_absent, open_session, pull_if_absent, terminal_stream, with_draft, with_mmproj
from .media_files import as_media_items
from .migration_hints import note_seed_flag
from .options import AnswerFlags, Mmproj, Model, RunFlags, SamplingFlags, SessionFlags, ShowFlags, ToolFlags, WeightFlags, Yes, demand_room
from .prompt import read_prompt
from .screen import Screen
from .tools import offered_tools

if TYPE_CHECKING:
    from ..runtime.catalog import ModelRef
    from .media_files import MediaFile
    from .tools import ToolUse

EXAMPLES = """examples

  effllm chat fable
  effllm chat ./my-model -s "Answer in one sentence." --temp 0.3

In the chat, /help lists the commands. Ctrl-C stops an answer and keeps its text so far, a second one quits, as does Ctrl-D.
"""


def register(app: typer.Typer) -> None:
    add_command(app, "chat", "run a model", chat, EXAMPLES)


def chat(context: typer.Context, model: Model, answer: AnswerFlags, sampling: SamplingFlags, engine: RunFlags, weights: WeightFlags,
         saving: SessionFlags, tools: ToolFlags, show: ShowFlags, mmproj: Mmproj = None, yes: Yes = False) -> int:
    """Chat in the terminal. Piped text gets one answer, as with `run`."""
    from .run import answer_once

    screen = Screen(context.obj, show.markdown)
    found = find_or_absent(model, screen, yes)
    check_flags(answer, sampling, engine, saving)
    note_seed_flag(answer, screen)
    text = None if screen.environment.is_terminal(screen.environment.stdin) else read_prompt(None, "-", screen)
    if text is not None:
        screen.environment.require_stdout()
    else:
        terminal_stream(screen, model)
        demand_room(answer.max_tokens, "leave out -n, or for a prompt that is only read: effllm run MODEL PROMPT -n 0")
    engine = with_draft(engine, screen)
    options = engine.options(overflow=answer.overflow)
    here = with_mmproj(pull_if_absent(found, weights, options, screen, yes), mmproj, screen)
    with at_precision(here, weights, screen, options) as ref, offered_tools(tools, ref, engine, screen) as use:
        if text is not None:
            return answer_once(screen, ref, text, answer, sampling, engine, saving, show=show, tools=use)
        return converse(screen, ref, answer, sampling, engine, saving, show, tools=use)


def converse(screen: Screen, ref: ModelRef, answer: AnswerFlags, sampling: SamplingFlags, engine: RunFlags, saving: SessionFlags,
             show: ShowFlags, pictures: Sequence[MediaFile] = (), tools: ToolUse | None = None) -> int:
    """Chat at the terminal; the media in `pictures` go with the first message."""
    visible = terminal_stream(screen, ref.text)
    from .conversation import Conversation
    from .saving import SessionSaver

    keeper = SessionSaver(screen, ref, saving, engine.strict)
    with open_session(ref, answer, sampling, engine, screen) as session:
        keeper.begin(session)
        if tools:
            tools.begin(session)
            tools.say_offered(session)
        code = Conversation(ref.text, session, screen, visible, show.stats, keeper, as_media_items(pictures, session), tools).run()
        keeper.keep(session)
        return code
