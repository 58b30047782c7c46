"""`effllm list`: the models on this machine, and the aliases of others."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import typed
from .fitted_table import fitted_table
from .flags import add_command, flag
from .options import OUTPUT, Json
from .screen import Screen

All = Annotated[bool, flag(OUTPUT, "-a --all", "", "also show names of models that are not downloaded")]
Long = Annotated[bool, flag(OUTPUT, "-l --long", "", "also show each model's revision, and whether it has a chat template")]
COMMIT_DIGITS = 12  # digits of a commit


def register(app: typer.Typer) -> None:
    add_command(app, "list", "inspect", list_models)


def list_models(context: typer.Context, all: All = False, long: Long = False, json: Json = False) -> None:
    """List the models on this machine."""
    from ..offload.size import format_size
    from ..runtime.catalog import catalog
    from ..runtime.hub import shown_licence
    from ..runtime.library.listing import incomplete_models, local_models, unreadable_models

    screen = Screen(context.obj)
    screen.environment.require_stdout()
    variables = screen.environment.variables
    local, incomplete = local_models(variables), incomplete_models(variables)
    unreadable = unreadable_models(variables, local)
    names = {model.name for model in local}
    absent = [entry for entry in catalog(variables) if entry.alias not in names and entry.repo] if all else []
    if json:
        screen.json({
            "models": [{"name": model.name, "family": model.family, "parameters": model.params, "size_bytes": model.size_bytes,
                        "bits_per_weight": round(model.bits, 4), "context": model.context, "licence": model.licence,
                        "revision": model.revision, "chat_template": model.has_template, "source": model.source,
                        "input_modalities": ["text", *model.takes], "folder": str(model.folder),
                        "mmproj": model.mmproj and str(model.mmproj)}
                       for model in local],
            "incomplete": [{"name": each.name, "bytes_here": each.held, "bytes_total": each.size} for each in incomplete],
            "unreadable": [{"name": each.name, "folder": str(each.folder), "why": each.why} for each in unreadable],
            "absent": [{"name": entry.alias, "repo": entry.repo, "parameters": entry.params, "size_bytes": entry.size_bytes,
                        "licence": entry.licence, "gated": entry.gated} for entry in absent]})
        return
    shows_inputs = any(model.takes for model in local)  # otherwise the column would be empty
    # Names stay whole, since users type them. A narrow terminal has either the column "from" or, with --long, what only that shows.
    headings = ("model", "family", "parameters", "bits", "size", "context", *(("input",) if shows_inputs else ()),
                *(("revision", "template") if long else ()), "licence", "from")
    rows = [(model.name, model.family, format_parameters(model.params), f"{model.bits:.3g}", format_size(model.size_bytes),
             str(model.context), *((", ".join(("text", *model.takes)),) if shows_inputs else ()),
             *((short_revision(model.revision), "yes" if model.has_template else "none") if long else ()),
             shown_licence(model.licence), model.source) for model in local]
    spare = ("family", *(("input",) if shows_inputs else ()), "context", "parameters", "bits", "size") if long else ("from", "family")
    fitted_table(screen, headings, rows, ("parameters", "bits", "size", "context"), spare=spare)
    if incomplete:
        screen.line()
        screen.table(("incomplete", "here", "of"), [(each.name, format_size(each.held), format_size(each.size)) for each in incomplete],
                     right=(1, 2))
        if any(each.is_pulled for each in incomplete):
            screen.note("`effllm pull NAME` continues an incomplete download, `effllm rm NAME` removes it")
        if unfinished := [each.name for each in incomplete if not each.is_pulled]:
            screen.note(f"{', '.join(unfinished)}: run the same command to continue, `effllm rm NAME` removes it")
    for each in unreadable:
        screen.note(f"{each.name} cannot run: {each.why}; `effllm rm {typed(each.name)}` removes it")
    if absent:
        screen.line()
        fitted_table(screen, ("not here", "repository", "parameters", "size", "licence", ""),
                     [(entry.alias, entry.repo or "", entry.params, format_size(entry.size_bytes), shown_licence(entry.licence),
                       "gated" if entry.gated else "") for entry in absent],
                     ("parameters", "size"), spare=("repository",))
        screen.note("`effllm plan NAME` says whether one fits this machine; `effllm pull NAME` downloads it, and with --bits 4 keeps it in "
                    "about a quarter of the size; gated: the publisher requires you to accept its terms first")
    else:
        screen.note("`effllm list --all` also shows the names of models that are not downloaded; `effllm pull MODEL` fetches one")


def short_revision(revision: str | None) -> str:
    """The beginning of a commit hash, or of what identifies local source files."""
    return (revision or "")[:COMMIT_DIGITS] if revision is None or not revision.startswith("local-") else revision


def format_parameters(parameters: int) -> str:
    """5.8M, 1.10B."""
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"
