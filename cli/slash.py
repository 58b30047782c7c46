"""The slash commands of a chat: a table of names, with one small function each. They change the session and write through the screen."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .. import EffllmError, UsageError
from . import clipboard, slash_lora, tools
from .attachment import complete_path, edit_text, expand_path
from .chat_settings import OLLAMA_NAMES, run_set, setting_names, suggestion
from .slash_attach import attach, attach_audio, attach_image, attach_video

if TYPE_CHECKING:
    from .conversation import Conversation

MAX_EDITED_LINES = 12  # shown of a message from the editor


class LeaveChat(Exception):
    """The user leaves the chat."""


@dataclass(frozen=True)
class SlashCommand:
    """A command of a chat: its usage and meaning are the lines of /help."""

    name: str
    usage: str
    meaning: str
    run: Callable[[Conversation, str], None]

    @property
    def takes_arguments(self) -> bool:
        return any(" " in form for form in self.usage.split(", "))


def show_help(chat: Conversation, rest: str) -> None:
    """`/help`, `/help NAME`."""
    commands = [find_command(rest.removeprefix("/"))] if rest else COMMANDS
    width = max(len(command.usage) for command in commands)
    indent = 2 + width + 2 if chat.screen.environment.width >= 2 * (2 + width + 2) else 6
    for command in commands:
        chat.screen.note(f"  {command.usage:<{width}}  {command.meaning}", indent)
    if rest:
        return
    chat.screen.note("Alt-Enter or a \\ at the end of a line starts a new line; "
                     "\"\"\" begins and ends a block. Ctrl-C stops an answer, a second one quits.")


def leave(chat: Conversation, rest: str) -> None:
    raise LeaveChat


def clear(chat: Conversation, rest: str) -> None:
    chat.saver.cleared_since_save |= bool(chat.session.messages)
    chat.session.clear()
    chat.was_cleared = True
    chat.screen.note("the conversation is empty" + (" (the system prompt stays)" if chat.session.system else ""))


def regenerate(chat: Conversation, rest: str) -> None:
    require_user_message(chat)
    chat.answer(chat.session.regenerate())


def continue_answer(chat: Conversation, rest: str) -> None:
    require_user_message(chat)
    before = list(chat.session.messages)
    chat.answer(chat.session.continue_())
    if chat.session.messages == before and chat.ended_by_itself:
        chat.screen.note("the answer is complete: the model adds nothing (/regen writes another one)")


def undo(chat: Conversation, rest: str) -> None:
    require_user_message(chat)
    chat.session.undo()
    if not chat.session.messages:
        chat.session.clear()  # also drops the cache of the undone question
        chat.saver.keep(chat.session, undone=True)
    chat.screen.note("removed the last question and its answer")


def compact(chat: Conversation, rest: str) -> None:
    require_user_message(chat)
    before = list(chat.session.messages)
    chat.answer(chat.session.compact())
    if chat.session.messages != before:
        chat.screen.note("the conversation is now this summary")


def require_user_message(chat: Conversation) -> None:
    if not any(message["role"] == "user" for message in chat.session.messages):
        raise UsageError("the conversation is empty", "type a question first")


def system(chat: Conversation, rest: str) -> None:
    if rest:
        chat.session.system = None if rest in ("off", '""') else rest
    chat.screen.note(f"system prompt: {chat.session.system}" if chat.session.system else "no system prompt (/system TEXT sets one)")


def show(chat: Conversation, rest: str) -> None:
    from ..offload.size import format_size

    session, engine = chat.session, chat.session.engine
    config, placement = engine.config, engine.placement
    weights = format_size(placement.weights_bytes)  # the dtype in the config does not describe quantized weights
    chat.screen.note(f"model {chat.name}: {config.family}, {config.num_hidden_layers} layers, weights {weights}")
    chat.screen.note(f"context {session.used} of {session.n_ctx} tokens, {len(session.messages)} messages, cache {engine.options.kv}, "
                     f"layers on {', '.join(sorted(set(placement.devices)))}")
    system(chat, "")
    run_set(chat, "")


def stats(chat: Conversation, rest: str) -> None:
    chat.show_stats()


def save(chat: Conversation, rest: str) -> None:
    """`/save`, `/save NAME` with the cache; `/save ./FILE.json` the conversation alone."""
    from ..offload.size import format_size

    messages = len(chat.session.messages)
    if is_path(rest):
        path = expand_path(rest)
        if not may_save(chat, path, os.path.isfile(path), str(path)):
            return
        chat.session.save(path)
        chat.saved_as.add(path)
        chat.screen.note(f"saved {messages} messages to {path}")
        return
    name = session_name(chat, rest, "/save")
    if not may_save(chat, name, chat.saver.store.has(name), f"session {name}"):
        return
    saved = chat.saver.save(chat.session, name)
    chat.saved_as.add(name)
    tokens, files = (len(saved.cache.tokens), saved.cache.files) if saved.cache else (0, ())
    size = format_size(sum(file.stored_nbytes for file in files))
    chat.screen.note(f"saved {messages} messages and {tokens} tokens of cache ({size}) as {saved.name}")


def load(chat: Conversation, rest: str) -> None:
    if is_path(rest):
        path = expand_path(rest)
        if not os.path.isfile(path):
            raise EffllmError(f"there is no file {path}", "/load NAME continues a session, /load ./FILE.json a conversation of a file")
        chat.session.load(path)
        chat.saved_as.add(path)
        chat.screen.note(f"loaded {len(chat.session.messages)} messages from {path}")
        if (detached := chat.saver.detach()) is not None:
            chat.screen.note(f"session {detached} stays as it is; what follows is kept after /save NAME")
        return
    name = session_name(chat, rest, "/load")
    chat.saver.load(chat.session, name)
    chat.saved_as.add(name)
    chat.saver.continue_as(name)  # later messages are saved there


def is_path(rest: str) -> bool:
    """A bare name is a session; anything with a slash or `.json` is a path."""
    return "/" in rest or rest.strip().endswith(".json")


def session_name(chat: Conversation, rest: str, command: str) -> str:
    name = rest.strip() or chat.saver.name
    if not name:
        raise UsageError(f"{command} needs a name without --session", f"{command} NAME, or {command} ./FILE.json")
    return name


def session_names(chat: Conversation) -> list[str]:
    """Saved sessions, for completion and hints; empty if they cannot be read."""
    try:
        return chat.saver.store.names()
    except EffllmError:
        return []


def edit(chat: Conversation, rest: str) -> None:
    message = edit_text(rest, chat.screen.environment.variables, chat.output)
    lines = message.splitlines()
    for line in lines[:MAX_EDITED_LINES]:  # the terminal shows the question, as for a typed message
        chat.screen.note(f"… {line}")
    if len(lines) > MAX_EDITED_LINES:
        chat.screen.note(f"… and {len(lines) - MAX_EDITED_LINES} more lines")
    chat.send(message)


def export(chat: Conversation, rest: str) -> None:
    from ..runtime.files.atomic_write import write_text_atomic
    from .transcript import transcript

    require_user_message(chat)
    if not rest:
        raise UsageError("/export needs a file", "/export talk.md, or talk.json")
    path = expand_path(rest)
    text = transcript(path, chat.name, chat.session)
    if os.path.isfile(path) and not may_overwrite(chat, str(path)):
        return
    write_text_atomic(path, text, "choose another place: /export FILE")
    chat.screen.note(f"wrote {len(chat.session.messages)} messages to {path}")


def may_save(chat: Conversation, target: str | Path, exists: bool, label: str) -> bool:
    """Whether to save the conversation as `target` (a session's name or a file). Asks if that would overwrite a conversation that this chat
    neither saved nor loaded, or that another process has changed; a cleared conversation never overwrites without asking."""
    saver = chat.saver
    if not exists:
        return True
    is_empty = chat.was_cleared and not chat.session.messages
    is_ours = target in {*chat.saved_as, saver.name} - saver.other_sessions
    if is_ours and not is_empty and not (isinstance(target, str) and saver.changed_by_other_process(target)):
        return True
    return may_overwrite(chat, label)


def may_overwrite(chat: Conversation, label: str) -> bool:
    """Ask whether to overwrite; a no is confirmed with a note. Raises UsageError if nobody can be asked."""
    if not chat.screen.environment.is_interactive:
        raise UsageError(f"{label} exists already, and there is no terminal for questions", "choose another name")
    try:
        overwrite = chat.screen.confirm(f"{label} exists already. Overwrite it?", default=False)
    except KeyboardInterrupt:
        overwrite = False
    if not overwrite:
        chat.screen.note(f"{label} stays as it is")
    return overwrite


COMMANDS = (
    SlashCommand("help", "/help [NAME]", "this list, or one line of it", show_help),
    SlashCommand("exit", "/exit, /bye", "quit (also Ctrl-D)", leave),
    SlashCommand("clear", "/clear", "forget the conversation", clear),
    SlashCommand("regen", "/regen, /retry", "answer the last question again", regenerate),
    SlashCommand("continue", "/continue", "continue the last answer", continue_answer),
    SlashCommand("undo", "/undo", "remove the last question and its answer", undo),
    SlashCommand("edit", "/edit [TEXT]", "write the message in $VISUAL or $EDITOR", edit),
    SlashCommand("file", "/file PATH", "add a text file to the next message; /file off drops it", attach),
    SlashCommand("image", "/image PATH", "add an image to the next message; /image off drops it", attach_image),
    SlashCommand("video", "/video PATH", "add frames of a video to the next message; /video off drops them", attach_video),
    SlashCommand("audio", "/audio PATH", "add an audio clip to the next message; /audio off drops it", attach_audio),
    SlashCommand("compact", "/compact", "replace the conversation with a summary of it", compact),
    SlashCommand("system", "/system [TEXT|off]", "show or set the system prompt", system),
    SlashCommand("set", "/set [NAME [VALUE]]", "show or change settings, such as /set temp 0.5", run_set),
    SlashCommand("lora", slash_lora.USAGE, "show or set the scale of each adapter, such as /lora sql 0.5", slash_lora.set_adapter),
    SlashCommand("tools", tools.USAGE, "list the tools of --mcp; turn one, or all of a server's, on or off", tools.tools),
    SlashCommand("show", "/show", "show the model, the context and the settings", show),
    SlashCommand("stats", "/stats", "show the speed and memory of the last answer", stats),
    SlashCommand("save", "/save [NAME]", "save the conversation and its cache; /save FILE.json saves only the text", save),
    SlashCommand("load", "/load NAME", "continue a saved conversation", load),
    SlashCommand("copy", clipboard.USAGE, "copy the last answer, or its last block of code, to the clipboard", clipboard.copy),
    SlashCommand("export", "/export FILE", "write the conversation as FILE.md or FILE.json", export),
)
ALIASES = {"bye": "exit", "quit": "exit", "?": "help", "retry": "regen", "redo": "regen", "regenerate": "regen", "read": "file",
           "new": "clear", "reset": "clear"}
BY_NAME = {command.name: command for command in COMMANDS}


def run(chat: Conversation, line: str) -> None:
    """Run a slash command."""
    words = line[1:].split(None, 1)
    name, rest = (*words, "", "")[:2]
    command = find_command(name, rest.strip())
    if name == "show" and rest.strip() in ("info", "parameters", "system"):  # Ollama's subcommands; ours shows everything
        rest = ""
    if rest and not command.takes_arguments:
        raise UsageError(f"/{name} takes no arguments, not {rest.strip()!r}",
                         f"/{name} alone; a space before the slash sends the line to the model"
                         if name != "show" else "/show alone; effllm show MODEL describes its files, and --template prints its template")
    command.run(chat, rest.strip())


def find_command(name: str, rest: str = "") -> SlashCommand:
    """The command of that name. Raises UsageError; for the name of a setting it suggests `/set NAME REST`."""
    command = BY_NAME.get(ALIASES.get(name, name))
    if command is None:
        setting = OLLAMA_NAMES.get(name, name.replace("_", "-"))
        set_hint = f", did you mean {f'/set {setting} {rest}'.rstrip()}?" if setting in setting_names() else ""
        if name in ("model", "models"):
            raise UsageError(f"there is no command /{name}: a chat has one model", "/exit, then effllm chat MODEL; effllm list shows them")
        raise UsageError(f"there is no command /{name}{set_hint or suggestion(name, [*BY_NAME, *ALIASES], '/')}",
                         "/help lists them; a space before the slash sends the line to the model")
    return command


def complete(chat: Conversation, line: str) -> Iterable[tuple[str, str]]:
    """(word, meaning) of the completions of a slash command."""
    command, space, typed = line.rpartition(" ")
    if not space:
        return [(f"/{each.name}", each.meaning) for each in COMMANDS if f"/{each.name}".startswith(line)]
    if command.strip() in ("/file", "/image", "/video", "/audio", "/export"):
        return [(path, "") for path in complete_path(typed)]
    words = {"/set": setting_names(), "/tools": ["on", "off"], **dict.fromkeys(("/tools on", "/tools off"), tools.names(chat)),
             "/copy": ["code"], "/load": session_names(chat), "/lora": chat.session.engine.prepared.adapters.names}.get(command.strip(), [])
    return [(word, "") for word in words if word.startswith(typed)]
