"""`effllm chat`: the command. The conversation itself is in conversation.py, which only a terminal needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from .. import UsageError
from .flags import add_command
from .loading import at_bits, find_or_pull, open_session, with_draft
from .options import AnswerFlags, Model, RunFlags, SamplingFlags, SessionFlags, ShowFlags, WeightFlags, Yes
from .prompt import read_prompt
from .screen import Screen

if TYPE_CHECKING:
    from ..runtime.catalog import ModelRef

EXAMPLES = """examples

  effllm chat fable
  effllm chat ./my-model -s "Answer in one sentence." --temp 0.3

In the chat, /help lists the commands. Ctrl-C stops an answer and keeps what was written; Ctrl-D leaves.
"""


def register(app: typer.Typer) -> None:
    add_command(app, "chat", "talk to a model", chat, EXAMPLES)


def chat(context: typer.Context, model: Model, answer: AnswerFlags, sampling: SamplingFlags, engine: RunFlags, weights: WeightFlags,
         saving: SessionFlags, show: ShowFlags, yes: Yes = False) -> int:
    """Chat in the terminal; piped text is answered once, as by `run`."""
    screen = Screen(context.obj, show.markdown)
    engine = with_draft(engine, screen)
    with at_bits(find_or_pull(model, weights.bits, engine, screen, yes), weights, screen, engine.threads) as ref:
        if not screen.environment.is_terminal(screen.environment.stdin):
            from .run import answer_once

            return answer_once(screen, ref, read_prompt(None, "-", screen), answer, sampling, engine, saving, show=show)
        return converse(screen, ref, answer, sampling, engine, saving, show)


def converse(screen: Screen, ref: ModelRef, answer: AnswerFlags, sampling: SamplingFlags, engine: RunFlags, saving: SessionFlags,
             show: ShowFlags) -> int:
    """Chat with the person at the terminal, who must be able to see what is typed: on stdout, else on stderr."""
    environment = screen.environment
    visible = next((stream for stream in (environment.stdout, environment.stderr) if environment.is_terminal(stream)), None)
    if visible is None:
        raise UsageError("a chat needs a terminal to show what you type", f'effllm run {ref.text} "your prompt"')
    from .conversation import Conversation
    from .saving import Keeper

    keeper = Keeper(screen, ref, saving, engine.strict)
    with open_session(ref, answer, sampling, engine, screen) as session:
        keeper.begin(session)
        code = Conversation(ref.text, session, screen, visible, show.stats, keeper).run()
        keeper.keep(session)
        return code
