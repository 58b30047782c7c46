"""`effllm pull MODEL`: what it would take, then the files; and the same offer for `run` and `chat` of a model that is not here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from .. import DoesNotFit, ModelNotFound, UsageError
from .flags import add_command, flag
from .loading import follow, last
from .options import MEMORY, OUTPUT, Json, Model, Yes
from .screen import Screen

if TYPE_CHECKING:
    from ..runtime.catalog import Absent, ModelRef
    from ..runtime.pull.client import Client
    from ..runtime.pull.plan import PullPlan
    from ..runtime.pull.pull import Pulled

NETWORK = "network"
EXAMPLES = """examples

  effllm pull tinyllama
  effllm pull qwen3-4b --bits 4       # quantized as it comes, one file of the original at a time
  effllm pull org/repo@v1.0 --dry-run
  effllm pull org/repo:model.Q4_K_M.gguf
  effllm pull org/repo:Q4_K_M         # the one GGUF file of that precision

Files go into the Hugging Face cache (HF_HUB_CACHE, HF_HOME), where other tools find them; what --bits makes goes into effllm's own
folder. A pull that was stopped goes on where it stopped. HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE and HTTPS_PROXY are honoured.
"""

Bits = Annotated[int | None, flag(MEMORY, "--bits", "8|6|5|4|3|2", "quantize the weights as they come, and keep those alone")]
Keep = Annotated[bool, flag(MEMORY, "--keep", "", "with --bits: keep the published weights too")]
DryRun = Annotated[bool, flag(OUTPUT, "--dry-run", "", "say what it would take and load nothing")]
Offline = Annotated[bool, flag(NETWORK, "--offline", "", "no network: use what is here, or fail")]


def register(app: typer.Typer) -> None:
    add_command(app, "pull", "get and keep models", pull, EXAMPLES)


def pull(context: typer.Context, model: Model, bits: Bits = None, keep: Keep = False, dry_run: DryRun = False, offline: Offline = False,
         yes: Yes = False, json: Json = False) -> None:
    """Download a model, or make it small as it comes."""
    from ..runtime.pull.client import Client
    from ..runtime.pull.plan import plan_pull, wish_of
    from ..runtime.reference import parse_reference

    screen = Screen(context.obj)
    variables = screen.environment.variables
    reference = parse_reference(model, variables)
    if reference.path is not None:
        raise UsageError(f"{model} is a path, and pull fetches from the hub", "give an alias or org/repo: effllm list --all")
    wish = wish_of(reference, variables, chosen_bits(reference.variant, bits, keep, model), keep)
    client = Client(variables, offline)
    if client.offline and (here := present(model, wish.bits, variables)) is not None:
        say_done(here, None, None, screen, json)
        return
    plan = plan_pull(wish, client, variables)
    if not json:
        show_plan(plan, client, screen)
    if dry_run:
        if json:
            screen.json(plan.to_json())
        return
    confirm_memory(plan, screen, yes)
    pulled = fetch(plan, client, screen)
    say_done(pulled.folder, pulled, plan, screen, json)


def chosen_bits(variant: str | None, bits: int | None, keep: bool, model: str) -> str | None:
    """The format of the name or of --bits, judged."""
    if keep and bits is None and variant is None:
        raise UsageError("--keep keeps the published weights beside what --bits makes", f"effllm pull {model} --bits 4 --keep")
    given = f"{bits}bit" if bits is not None else None
    if variant and given and variant != given:
        raise UsageError(f"{model} and --bits {bits} disagree", "give one of them")
    return variant or given


def present(model: str, bits: str | None, variables: Mapping[str, str]) -> object:
    """The folder of a model that needs no network, None where it is not whole."""
    from ..runtime.catalog import resolve

    try:
        ref = resolve(model, variables)
    except ModelNotFound:
        return None
    return ref.folder if not (bits and ref.variant) else None


def fetch(plan: PullPlan, client: Client, screen: Screen) -> Pulled:
    """Run the plan with progress; Ctrl-C says how to go on."""
    from ..runtime.pull.pull import Pulled, pull_model

    try:
        return last(follow(pull_model(plan, client, screen.environment.variables), screen, Pulled))
    except KeyboardInterrupt:
        screen.note(f"stopped; what came is kept. effllm pull {plan.wish.reference.text}{suffix(plan)} goes on from here")
        raise


def suffix(plan: PullPlan) -> str:
    """The flags that make the same plan again."""
    wish = plan.wish
    bits = f" --bits {wish.bits.removesuffix('bit')}" if wish.bits and not wish.reference.variant else ""
    return bits + (" --keep" if wish.keep else "")


def show_plan(plan: PullPlan, client: Client, screen: Screen) -> None:
    """The plan on stderr: stdout is for the answer of `run`, and for --json."""
    from ..offload.size import format_size

    repository, wish, memory = plan.repository, plan.wish, plan.memory
    if repository.repo != repository.asked:
        screen.note(f"{repository.asked} is called {repository.repo} now")
    gate = ", gated: your token must have access" if repository.gated else ""
    here = f", {format_size(plan.held_bytes)} of it here already" if plan.held_bytes else ""
    made = f" at {wish.bits}" if wish.bits else ""
    lines = [("model", f"{repository.repo} at {repository.commit[:12]}" + (f" ({wish.entry.alias})" if wish.entry else "")),
             ("licence", f"{plan.licence or 'not stated'}{gate}"),
             ("download", f"{format_size(plan.to_load)} in {len(plan.files)} files{here}"),
             ("kept", f"{format_size(plan.kept_bytes)}{made} in {plan.folder}"),
             ("disk", f"{format_size(plan.disk_bytes)} needed at most, {format_size(plan.disk_free)} free")]
    if memory is not None:
        lines.append(("memory", f"{format_size(memory.total_bytes)} of {format_size(memory.budget_bytes)}, context {memory.context}"
                      if memory.fits else f"does not fit now: {memory.reason}"))
    if plan.tokens_per_s is not None:
        lines.append(("speed", f"about {plan.tokens_per_s:.3g} tokens/s (± {100 * plan.tokens_per_s_error:.0f}%)"))
    elif plan.speed_unknown:
        lines.append(("speed", f"not known: {plan.speed_unknown}"))
    for name, text in lines:
        screen.note(f"{name:<10}{text}")


def confirm_memory(plan: PullPlan, screen: Screen, yes: bool) -> None:
    """A model that could not run here is loaded only if a person says so."""
    if plan.memory is None or plan.memory.fits or yes:
        return
    smaller = f"effllm pull {plan.wish.reference.text} --bits 4 may fit; -y loads it anyway" if not plan.wish.bits else "-y loads it anyway"
    if not screen.environment.can_ask:
        raise DoesNotFit(f"{plan.wish.reference.text} would not run here: {plan.memory.reason}", smaller)
    if not screen.ask("It would not run on this machine now. Load it anyway?"):
        raise DoesNotFit("nothing was loaded", smaller)


def say_done(folder: object, pulled: Pulled | None, plan: PullPlan | None, screen: Screen, json: bool) -> None:
    from ..offload.size import format_size

    if json:
        screen.json({"folder": str(folder), "bytes_loaded": pulled.nbytes_loaded if pulled else 0,
                     "seconds": pulled.seconds if pulled else 0.0, "plan": plan.to_json() if plan else None})
    elif pulled is None or pulled.was_here:
        screen.note(f"{folder}: everything is here")
    else:
        loaded = f"{format_size(pulled.nbytes_loaded)} loaded and checked" if pulled.nbytes_loaded else "made of what was here"
        screen.note(f"{folder}: {loaded}; effllm run {plan.wish.reference.text}"
                    + (f":{plan.wish.bits}" if plan.wish.bits and not plan.wish.reference.variant else ""))


def offer(absent: Absent, bits: str | None, screen: Screen, yes: bool) -> ModelRef:
    """The model after a pull that a person agreed to, at the terminal or by -y; without either the error stands."""
    from ..runtime.catalog import resolve
    from ..runtime.pull.client import Client
    from ..runtime.pull.plan import plan_pull, wish_of

    variables = screen.environment.variables
    client = Client(variables)
    if not yes and not screen.environment.can_ask:
        raise absent
    plan = plan_pull(wish_of(absent.reference, variables, bits), client, variables)
    show_plan(plan, client, screen)
    if plan.memory is not None and not plan.memory.fits:
        confirm_memory(plan, screen, False)
    elif not yes and not screen.ask("Load it?"):
        raise absent
    fetch(plan, client, screen)
    return resolve(absent.reference.text, variables)
