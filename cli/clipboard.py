"""`/copy`: copies the last answer of a chat, or its last code block, to the clipboard, without the terminal's line breaks.

A clipboard program is used if there is one. Over SSH it would fill the clipboard of the remote machine, so the terminal's OSC 52 sequence
is sent instead, which reaches the user's own. Not every terminal supports it, and none confirms it, so the note says what was tried."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from .. import EffllmError, UsageError
from ..runtime.images.media_markers import describe_markers
from ..runtime.tokens.terminal_text import sanitize

if TYPE_CHECKING:
    from .conversation import Conversation

USAGE = "/copy [code]"
BLOCK = re.compile(r"^[ \t]*(`{3,}|~{3,})[^\n]*\n(.*?)(?:^[ \t]*\1|\Z)", re.MULTILINE | re.DOTALL)
# (variable that is set in its window system, command) of programs that copy their input. tmux by default does not forward OSC 52 sequences
# of programs, but sends its own.
TMUX = "TMUX"
PROGRAMS = (("WAYLAND_DISPLAY", ("wl-copy",)), ("DISPLAY", ("xclip", "-selection", "clipboard")),
            ("DISPLAY", ("xsel", "--input", "--clipboard")), (None, ("pbcopy",)), (TMUX, ("tmux", "load-buffer", "-w", "-")))
REMOTE = ("SSH_CONNECTION", "SSH_TTY")
MAX_OSC52 = 74_000  # bytes: terminals truncate more than 100,000 characters of base64
TIMEOUT_S = 5.0


def copy(chat: Conversation, rest: str) -> None:
    """`/copy`, `/copy code`."""
    if rest not in ("", "code"):
        raise UsageError(f"/copy takes code or nothing, not {rest!r}", "/copy code copies only the last code block")
    answers = [message["content"] for message in chat.session.messages if message["role"] == "assistant"]
    if not answers:
        raise UsageError("there is no answer yet", "type a question first")
    text = sanitize(describe_markers(answers[-1])).strip()
    if rest:
        blocks = BLOCK.findall(text)
        if not blocks:
            raise UsageError("the last answer has no code block", "/copy takes all of it")
        text = blocks[-1][1].rstrip("\n")
    if not text:
        raise UsageError("the last answer is empty", "/regen writes another one")
    screen, count = chat.screen, f"{len(text)} character{'' if len(text) == 1 else 's'}"
    if (program := copy_with_program(text, screen.environment.variables)) is not None:
        screen.note(f"{count} copied to the tmux buffer, which forwards them to the terminal's clipboard" if program == "tmux" else
                    f"{count} are in the clipboard ({program})")
        return
    if not screen.environment.can_redraw(chat.output):
        raise EffllmError("no clipboard is available", "/export FILE writes the conversation")
    if len(data := text.encode()) > MAX_OSC52:
        raise EffllmError(f"{len(data)} bytes are more than terminals take for a clipboard", "/export FILE writes the conversation")
    chat.output.write(f"\x1b]52;c;{base64.b64encode(data).decode()}\x07")
    chat.output.flush()
    screen.note(f"{count} sent to the terminal's clipboard; if it does not support that, use /export FILE")


def copy_with_program(text: str, variables: Mapping[str, str]) -> str | None:
    """Copy with the first program that works; returns its name, None if there is none."""
    is_remote = any(map(variables.get, REMOTE))
    for window_system, argv in PROGRAMS:
        if window_system is not None and not variables.get(window_system) or is_remote and window_system != TMUX:
            continue
        if (path := shutil.which(argv[0], path=variables.get("PATH"))) is None:
            continue
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run([path, *argv[1:]], input=text.encode(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True,
                           timeout=TIMEOUT_S, env=dict(variables))
            return argv[0]
    return None
