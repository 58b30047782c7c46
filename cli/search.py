"""`effllm search [WORDS ...]`: models on the hub that run here, and whether they fit this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .. import DownloadFailed, UsageError, typed
from .fitted_table import fitted_table
from .flags import add_command, flag
from .list_ import format_parameters
from .options import OUTPUT, Json
from .pull import NETWORK, Offline
from .screen import Screen

if TYPE_CHECKING:
    from ..runtime.pull.search import SearchResult

EXAMPLES = """examples

  effllm search qwen3 coder
  effllm search gemma gguf --sort new
  effllm search --sort trending       # any model that generates text
  effllm search bert --all            # also those that do not run, and why

The column "fits" goes by size alone: yes, at 4 bits (with --bits 4, or as a Q4_K_M file), or larger (than memory; some of these run from
the disk). `effllm plan NAME` reads a model's header and is exact. HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE and HTTPS_PROXY are honoured.
"""

Words = Annotated[list[str] | None, typer.Argument(metavar="WORDS ...", help="words in the model's name", show_default=False)]
Sort = Annotated[Literal["downloads", "likes", "trending", "new"],
                 flag(NETWORK, "--sort", "downloads|likes|trending|new", "what comes first (downloads)")]
Limit = Annotated[int, flag(OUTPUT, "--limit", "N", "how many to show, 100 at most (20)")]
All = Annotated[bool, flag(OUTPUT, "-a --all", "", "also show models that do not run here, and why")]
MAX_RESULTS = 100


def register(app: typer.Typer) -> None:
    add_command(app, "search", "get and manage models", search_hub, EXAMPLES)


def search_hub(context: typer.Context, words: Words = None, sort: Sort = "downloads", limit: Limit = 20, all: All = False,
               offline: Offline = False, json: Json = False) -> None:
    """Find models on the hub that run here."""
    from ..runtime.pull.client import Client
    from ..runtime.pull.search import memory, search

    if not 1 <= limit <= MAX_RESULTS:
        raise UsageError(f"--limit {limit} is out of range", f"1 to {MAX_RESULTS}")
    screen = Screen(context.obj)
    screen.environment.require_stdout()
    text, client = " ".join(words or ()).strip(), Client(screen.environment.variables, offline)
    if client.offline:
        raise DownloadFailed("a search needs the hub, and offline mode is on", "leave out --offline and HF_HUB_OFFLINE; "
                             "effllm list --all names some models without it")
    with screen.waiting(f"asking {client.host}"):
        results = search(client, text, sort, limit)
    runnable = [each for each in results if not each.why_not]
    shown, memory_nbytes = (results if all else runnable)[:limit], memory()
    if json:
        screen.json({"memory_bytes": memory_nbytes, "found": [each.to_json(memory_nbytes) for each in shown]})
        return
    print_results(shown, memory_nbytes, screen)
    note_other_results(text, len(shown), len(runnable), len(results), all, limit, screen)


def print_results(shown: Sequence[SearchResult], memory: int, screen: Screen) -> None:
    if not shown:
        return
    from ..offload.size import format_size
    from ..runtime.hub import shown_licence

    shows_reason = any(each.why_not for each in shown)
    headings = ("model", "type", "format", "parameters", "size", "fits", "downloads", "licence", "", *(("runs",) if shows_reason else ()))
    fitted_table(screen, headings,
                 [(each.repo, each.kind, each.form, format_parameters(each.parameters) if each.parameters else "",
                   format_size(each.nbytes) if each.nbytes else "", each.fits(memory), abbreviate(each.downloads),
                   shown_licence(each.licence), "gated" if each.gated else "", *((runs_here(each),) if shows_reason else ()))
                  for each in shown], ("parameters", "size", "downloads"), spare=("format", "licence", "downloads", "type", "parameters"))
    example = next((each for each in shown if not each.why_not), None)
    if example is not None:
        screen.note(f"fits: by size alone, in {format_size(memory)} of memory; `effllm plan {typed(example.repo)}` is exact, "
                    f"`effllm pull {typed(example.repo)}` fetches it")
    if any(each.form == "GGUF" and not each.why_not for each in shown):
        screen.note("a GGUF repository has files of several precisions: add one to its name, as in org/repo:Q4_K_M")


def runs_here(result: SearchResult) -> str:
    """Whether a model runs here, and as what; why not otherwise."""
    return f"no: {result.why_not}" if result.why_not else "embeddings" if result.is_embedding_model else "yes"


def note_other_results(text: str, shown: int, running: int, found: int, all: bool, limit: int, screen: Screen) -> None:
    """The number of other results, and the next step if there are none."""
    criterion = f"by {text!r}" if text else "by the hub"
    if not found:
        screen.note(f"no model was found {criterion}: try fewer or other words")
    elif not shown:
        screen.note(f"none of the {found} models that were found {criterion} runs here; --all says why")
    elif not all and found > running and running < limit:
        screen.note(f"{found - running} more do not run here; --all says why")


def abbreviate(number: int) -> str:
    """950, 12.3k, 4.5M."""
    return f"{number / 1e6:.1f}M" if number >= 1e6 else f"{number / 1e3:.1f}k" if number >= 1e3 else str(number)
