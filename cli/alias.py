"""`effllm alias`: the user's own short names of models, in their models.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import UsageError
from .flags import add_command, flag
from .migration_hints import REMOVAL_WORDS
from .options import OUTPUT, Json, complete_model
from .screen import Screen

EXAMPLES = """examples

  effllm alias                              # lists yours and the file they are in
  effllm alias story fable
  effllm alias work ./my-model-4bit
  effllm alias mario --modelfile ./Modelfile  # Ollama's; its PARAMETER and SYSTEM become settings
  effllm alias --rm work
"""

Name = Annotated[str | None, typer.Argument(metavar="NAME", help="lower-case letters, digits, dots and dashes", show_default=False)]
Target = Annotated[str | None, typer.Argument(metavar="MODEL", help="the model it stands for: a local one, or a name from `effllm "
                                                                    "list -a`",
                                              autocompletion=complete_model, show_default=False)]
Remove = Annotated[bool, flag(OUTPUT, "--rm", "", "remove the name; the model stays")]
Modelfile = Annotated[str | None, flag(OUTPUT, "--modelfile", "FILE", "take the model and its settings from an Ollama Modelfile")]


def register(app: typer.Typer) -> None:
    add_command(app, "alias", "get and manage models", alias, EXAMPLES)


def alias(context: typer.Context, name: Name = None, model: Target = None, modelfile: Modelfile = None, rm: Remove = False,
          json: Json = False) -> None:
    """Give a model a short name, or list the names you gave."""
    from ..runtime.hub import shown_licence
    from ..runtime.library.aliases import check_alias, own_aliases, own_file, packaged, remove_alias, write_alias
    from ..runtime.library.listing import entry_for
    from .modelfile import find_settings_table

    screen = Screen(context.obj)
    variables = screen.environment.variables
    if modelfile is not None:
        message = import_from_modelfile(screen, name, model, modelfile, rm)
    elif rm:
        if name is None or model is not None:
            raise UsageError("--rm takes one NAME", "effllm alias --rm NAME")
        file = find_settings_table(name, screen.environment)
        remove_alias(variables, name)
        message = f"{name} is no longer an alias" + (f"; settings of that name stay in {file}" if file else "")
    elif name is not None:
        if model is None:
            raise UsageError("MODEL is missing", f"effllm alias {name} MODEL; without a name, effllm alias lists yours")
        if name in REMOVAL_WORDS:
            raise UsageError(f"{name} would be another name of {model}", f"effllm alias --rm {model} removes that one")
        check_alias(name)
        entry = entry_for(name, model, variables)
        write_alias(variables, entry)
        message = f"{name} is {entry.stands_for}" + (f"@{entry.revision}" if entry.revision != "main" else "")
        if any(each.alias == name for each in packaged()):
            message += f"; it hides the built-in name, which `effllm alias --rm {name}` restores"
    else:
        message = f"stored in {own_file(variables)}"
    aliases = own_aliases(variables)
    if name is None and not aliases:
        message = f"no aliases yet: effllm alias NAME MODEL adds one, {message}"
    if json:
        entries = {entry.alias: entry.to_yaml() | {"licence": entry.licence} for entry in aliases}
        screen.json({"file": str(own_file(variables)), "aliases": entries})
        return
    if name is None and (aliases or screen.report_width is None):  # a heading alone is for scripts
        screen.table(("alias", "model", "licence"),
                     [(entry.alias, entry.stands_for, shown_licence(entry.licence)) for entry in aliases])
    screen.note(message)


def import_from_modelfile(screen: Screen, name: str | None, model: str | None, modelfile: str, rm: bool) -> str:
    """Import a Modelfile, with a note for each ignored instruction. Returns the final message."""
    from .modelfile import find_settings_table, import_modelfile

    if name is None or model is not None or rm:
        raise UsageError("--modelfile takes only a NAME: its FROM names the model", "effllm alias NAME --modelfile FILE")
    entry, ignored = import_modelfile(name, Path(modelfile), screen.environment)
    for note in ignored:
        screen.note(note)
    settings_file = find_settings_table(name, screen.environment)
    return f"{name} is {entry.stands_for}" + (f'; its settings are in {settings_file}, below [model."{name}"]' if settings_file else "")
