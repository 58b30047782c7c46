"""The slash commands of a chat: a table of names, with one small function each. They change the session and write through the screen."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .. import EffllmError, UsageError
from . import clipboard, slash_lora, tools
from .attachment import completed_paths, named_path, written_in_editor
from .chat_settings import OLLAMAS, change, settable, suggestion
from .slash_attach import attach, attach_picture, attach_sound, attach_video

if TYPE_CHECKING:
    from .conversation import Conversation

EDITED_SHOWN = 12  # lines of a message from the editor


class Leave(Exception):
    """The user leaves the chat."""


@dataclass(frozen=True)
class SlashCommand:
    name: str
    usage: str
    meaning: str
    run: Callable[[Conversation, str], None]

    @property
    def takes_words(self) -> bool:
        return any(" " in form for form in self.usage.split(", "))


def show_help(chat: Conversation, rest: str) -> None:
    """`/help`, `/help NAME`."""
    shown = [named(rest.removeprefix("/"))] if rest else COMMANDS
    width = max(len(command.usage) for command in shown)
    hang = 2 + width + 2 if chat.screen.environment.width >= 2 * (2 + width + 2) else 6
    for command in shown:
        chat.screen.note(f"  {command.usage:<{width}}  {command.meaning}", hang)
    if rest:
        return
    chat.screen.note("Alt-Enter or a \\ at the end of a line starts a new line; "
                     "\"\"\" begins and ends a block. Ctrl-C stops an answer, a second one quits.")


def leave(chat: Conversation, rest: str) -> None:
    raise Leave


def clear(chat: Conversation, rest: str) -> None:
    chat.keeper.was_emptied |= bool(chat.session.messages)
    chat.session.clear()
    chat.was_cleared = True
    chat.screen.note("the conversation is empty" + (" (the system prompt stays)" if chat.session.system else ""))


def regenerate(chat: Conversation, rest: str) -> None:
    demand_turn(chat)
    chat.answer(chat.session.regenerate())


def continue_answer(chat: Conversation, rest: str) -> None:
    demand_turn(chat)
    before = list(chat.session.messages)
    chat.answer(chat.session.continue_())
    if chat.session.messages == before and chat.ended_by_itself:
        chat.screen.note("the answer is complete: the model adds nothing (/regen writes another one)")


def undo(chat: Conversation, rest: str) -> None:
    demand_turn(chat)
    chat.session.undo()
    if not chat.session.messages:
        chat.session.clear()  # what was taken back is in no cache either
        chat.keeper.keep(chat.session, taken_back=True)
    chat.screen.note("removed the last question and its answer")


def compact(chat: Conversation, rest: str) -> None:
    demand_turn(chat)
    before = list(chat.session.messages)
    chat.answer(chat.session.compact())
    if chat.session.messages != before:
        chat.screen.note("the conversation is now this summary")


def demand_turn(chat: Conversation) -> None:
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
    weights = format_size(placement.weights_bytes)  # a dtype of the config says little of what was quantized
    chat.screen.note(f"model {chat.name}: {config.family}, {config.num_hidden_layers} layers, weights {weights}")
    chat.screen.note(f"context {session.used} of {session.n_ctx} tokens, {len(session.messages)} messages, cache {engine.options.kv}, "
                     f"layers on {', '.join(sorted(set(placement.devices)))}")
    system(chat, "")
    change(chat, "")


def stats(chat: Conversation, rest: str) -> None:
    chat.show_cost()


def save(chat: Conversation, rest: str) -> None:
    """`/save`, `/save NAME` with the cache; `/save ./FILE.json` the conversation alone."""
    from ..offload.size import format_size

    messages = len(chat.session.messages)
    if is_path(rest):
        path = named_path(rest)
        if not may_save(chat, path, os.path.isfile(path), str(path)):
            return
        chat.session.save(path)
        chat.own.add(path)
        chat.screen.note(f"saved {messages} messages to {path}")
        return
    name = session_name(chat, rest, "/save")
    if not may_save(chat, name, chat.keeper.store.has(name), f"session {name}"):
        return
    kept = chat.keeper.save(chat.session, name)
    chat.own.add(name)
    tokens, files = (len(kept.cache.tokens), kept.cache.files) if kept.cache else (0, ())
    size = format_size(sum(file.stored_nbytes for file in files))
    chat.screen.note(f"saved {messages} messages and {tokens} tokens of cache ({size}) as {kept.name}")


def load(chat: Conversation, rest: str) -> None:
    if is_path(rest):
        path = named_path(rest)
        if not os.path.isfile(path):
            raise EffllmError(f"{path}: no such chat", f"saved: {', '.join(saved(chat)) or 'none yet'}")
        chat.session.load(path)
        chat.own.add(path)
        chat.screen.note(f"loaded {len(chat.session.messages)} messages from {path}")
        if (left := chat.keeper.leave()) is not None:
            chat.screen.note(f"session {left} stays as it is; what follows is kept after /save NAME")
        return
    name = session_name(chat, rest, "/load")
    chat.keeper.load(chat.session, name)
    chat.own.add(name)
    chat.keeper.go_on_as(name)  # what follows belongs to this conversation


def is_path(rest: str) -> bool:
    """A bare name is a session; anything with a slash or `.json` is a path."""
    return "/" in rest or rest.strip().endswith(".json")


def session_name(chat: Conversation, rest: str, command: str) -> str:
    name = rest.strip() or chat.keeper.name
    if not name:
        raise UsageError(f"{command} needs a name", f"{command} NAME, or {command} ./FILE.json")
    return name


def saved(chat: Conversation) -> list[str]:
    """Saved sessions, for completion and hints; empty if they cannot be read."""
    try:
        return chat.keeper.store.names()
    except EffllmError:
        return []


def edit(chat: Conversation, rest: str) -> None:
    message = written_in_editor(rest, chat.screen.environment.variables, chat.output)
    lines = message.splitlines()
    for line in lines[:EDITED_SHOWN]:  # so that the terminal shows the question, as for a typed message
        chat.screen.note(f"… {line}")
    if len(lines) > EDITED_SHOWN:
        chat.screen.note(f"… and {len(lines) - EDITED_SHOWN} more lines")
    chat.send(message)


def export(chat: Conversation, rest: str) -> None:
    from ..runtime.files.atomic_write import write_text_atomic
    from .transcript import transcript

    demand_turn(chat)
    if not rest:
        raise UsageError("/export needs a file", "/export talk.md, or talk.json")
    path = named_path(rest)
    text = transcript(path, chat.name, chat.session)
    if os.path.isfile(path) and not may_overwrite(chat, str(path)):
        return
    write_text_atomic(path, text, "choose another place: /export FILE")
    chat.screen.note(f"wrote {len(chat.session.messages)} messages to {path}")


def may_save(chat: Conversation, place: str | Path, is_there: bool, called: str) -> bool:
    """Whether to save a conversation at `place`, after asking if it would overwrite one that this chat neither saved nor loaded, or that
    another process has changed. A cleared conversation never overwrites without asking."""
    keeper, is_empty = chat.keeper, chat.was_cleared and not chat.session.messages
    own = not is_empty and place in {*chat.own, keeper.name} - keeper.others and not (isinstance(place, str) and keeper.is_anothers(place))
    return own or not is_there or may_overwrite(chat, called)


def may_overwrite(chat: Conversation, called: str) -> bool:
    """Ask; a no is confirmed in words."""
    if not chat.screen.environment.is_interactive:
        raise UsageError(f"{called} exists already, and there is no terminal for questions", "choose another name")
    try:
        overwrite = chat.screen.confirm(f"{called} exists already. Overwrite it?", default=False)
    except KeyboardInterrupt:
        overwrite = False
    if not overwrite:
        chat.screen.note(f"{called} stays as it is")
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
    SlashCommand("image", "/image PATH", "add an image to the next message; /image off drops it", attach_picture),
    SlashCommand("video", "/video PATH", "add frames of a video to the next message; /video off drops them", attach_video),
    SlashCommand("audio", "/audio PATH", "add an audio clip to the next message; /audio off drops it", attach_sound),
    SlashCommand("compact", "/compact", "replace the conversation with a summary of it", compact),
    SlashCommand("system", "/system [TEXT|off]", "show or set the system prompt", system),
    SlashCommand("set", "/set [NAME [VALUE]]", "show or change settings, such as /set temp 0.5", change),
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
    command = named(name, rest.strip())
    if name == "show" and rest.strip() in ("info", "parameters", "system"):  # Ollama's parts of what is shown here in one
        rest = ""
    if rest and not command.takes_words:
        raise UsageError(f"/{name} takes no arguments, not {rest.strip()!r}",
                         f"/{name} alone; a space before the slash sends the line to the model"
                         if name != "show" else "/show alone; effllm show MODEL describes its files, and --template prints its template")
    command.run(chat, rest.strip())


def named(name: str, rest: str = "") -> SlashCommand:
    """The command of that name. Raises UsageError, which for a setting's name shows how to `/set` it to `rest`."""
    found = BY_NAME.get(ALIASES.get(name, name))
    if found is None:
        setting = OLLAMAS.get(name, name.replace("_", "-"))
        set_so = f", did you mean {f'/set {setting} {rest}'.rstrip()}?" if setting in settable() else ""
        if name in ("model", "models"):
            raise UsageError(f"there is no command /{name}: a chat has one model", "/exit, then effllm chat MODEL; effllm list shows them")
        raise UsageError(f"there is no command /{name}{set_so or suggestion(name, [*BY_NAME, *ALIASES], '/')}",
                         "/help lists them; a space before the slash sends the line to the model")
    return found


def complete(chat: Conversation, line: str) -> Iterable[tuple[str, str]]:
    """(word, meaning) of the completions of a slash command."""
    command, space, typed = line.rpartition(" ")
    if not space:
        return [(f"/{each.name}", each.meaning) for each in COMMANDS if f"/{each.name}".startswith(line)]
    if command.strip() in ("/file", "/image", "/video", "/audio", "/export"):
        return [(path, "") for path in completed_paths(typed)]
    words = {"/set": settable(), "/tools": ["on", "off"], **dict.fromkeys(("/tools on", "/tools off"), tools.names(chat)),
             "/copy": ["code"], "/load": saved(chat), "/lora": chat.session.engine.prepared.adapters.names}.get(command.strip(), [])
    return [(word, "") for word in words if word.startswith(typed)]
