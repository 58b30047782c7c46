"""From a name on the command line to a session that can answer: resolve, read the tokenizer, load the weights with progress.

What is cheap to check comes first: a missing tokenizer is reported before gigabytes are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from .. import ModelNotFound, UsageError
from .screen import Screen

if TYPE_CHECKING:
    from ..runtime.catalog import ModelRef
    from ..runtime.engine import Engine, EngineOptions
    from ..runtime.session import Session
    from ..runtime.text import Tokenizer
    from .options import AnswerFlags, RunFlags, SamplingFlags, WeightFlags

Result = TypeVar("Result")


@dataclass(frozen=True)
class Loaded:
    engine: Engine
    tokenizer: Tokenizer


def find(model: str, screen: Screen) -> ModelRef:
    """The model of that name, its files present. A sentence in its place is told apart from a typing error."""
    ref = find_any(model, screen)
    if ref.variant:
        raise UsageError(f"{model} would be quantized as it is loaded, which this command does not do",
                         f"effllm quantize {model.rpartition(':')[0]} -o DIR --spec {ref.variant}, then give DIR")
    return ref


def find_any(model: str, screen: Screen) -> ModelRef:
    """`find` for a command that goes on with `at_bits`: the name may end in a format."""
    from ..runtime.catalog import resolve

    if " " in model.strip() and not Path(model).exists():
        raise ModelNotFound(f"{shortened(model)!r} is no model: the model comes first, then the prompt",
                            f'effllm run fable "{shortened(model)}"')
    ref = resolve(model, screen.environment.variables)
    if ref.notice:
        screen.note(ref.notice)
    return ref


def find_or_pull(model: str, bits: int | None, engine: RunFlags, screen: Screen, yes: bool) -> ModelRef:
    """`find_any` for a command that offers to load what is absent; `bits` as --bits gave them, `engine`: how it is to run."""
    from ..runtime.catalog import Absent

    try:
        return find_any(model, screen)
    except Absent as absent:
        from .pull import offer

        return offer(absent, None if bits is None else f"{bits}bit", screen, yes, engine.options())


@contextmanager
def at_bits(ref: ModelRef, weights: WeightFlags, screen: Screen, threads: int | None = None) -> Iterator[ModelRef]:
    """The model as it is stored, or quantized to --bits or to the format in its name: kept from before, kept now, or for this run."""
    bits = f"{weights.bits}bit" if weights.bits is not None else ref.variant
    if bits is None:
        if weights.keep:
            raise UsageError("--keep keeps what --bits makes", f"effllm run {ref.text} --bits 4 --keep")
        yield ref
        return
    from ..runtime import on_load
    from ..runtime.convert import Converted

    if ref.variant not in (None, bits):
        raise UsageError(f"{ref.text} and --bits {weights.bits} disagree", "give one of them")
    request = on_load.Request(ref, bits, screen.environment.models_folder, weights.keep, threads)
    if kept := on_load.find_kept(request):
        screen.note(f"weights of {bits} from {kept}")
        yield replace(ref, folder=kept)
    elif weights.keep:
        request.folder.parent.mkdir(parents=True, exist_ok=True)
        last(follow(on_load.quantize_on_load(request, request.folder), screen, Converted))
        yield replace(ref, folder=request.folder)
    else:
        with on_load.temporary_folder() as folder:
            last(follow(on_load.quantize_on_load(request, folder / "model"), screen, Converted))
            yield replace(ref, folder=folder / "model")


def shortened(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


@contextmanager
def loaded(ref: ModelRef, options: EngineOptions, screen: Screen) -> Iterator[Loaded]:
    """An engine with its weights in place, closed at the end."""
    from ..runtime.config import read_config
    from ..runtime.text import Tokenizer

    tokenizer = Tokenizer.load(ref.folder, read_config(ref.folder, options.strict))
    engine = open_with_progress(ref.folder, options, screen)
    try:
        yield Loaded(engine, tokenizer)
    finally:
        engine.close()


def text_side(folder: Path, options: EngineOptions) -> Tokenizer | None:
    """What a run has in memory when it plans, for a plan that is to say what the run will: the session's modules and the tokenizer, which
    for 128,000 tokens takes as much as a small model. None for a model without one, which a run refuses in words of its own."""
    from .. import EffllmError
    from ..runtime import session  # noqa: F401
    from ..runtime.config import read_config
    from ..runtime.text import Tokenizer

    try:
        return Tokenizer.load(folder, read_config(folder, options.strict))
    except EffllmError:
        return None


def open_with_progress(folder: Path, options: EngineOptions, screen: Screen) -> Engine:
    from ..runtime.engine import Engine, open_engine

    return last(follow(open_engine(folder, options), screen, Engine))


def follow(items: Iterable[object], screen: Screen, wanted: type[Result]) -> Iterator[Result]:
    """The results of an iterator that also reports progress and notices, which are shown here."""
    from ..runtime.events import Notice, Progress

    for item in items:
        if isinstance(item, Progress):
            screen.progress(item)
        elif isinstance(item, Notice):
            screen.note(item.text)
        elif isinstance(item, wanted):
            screen.clear()
            yield item
    screen.clear()


def last(items: Iterable[Result]) -> Result:
    *_, result = items
    return result


def with_draft(engine: RunFlags, screen: Screen) -> RunFlags:
    """The flags with the folder of the draft model in place of its name."""
    return engine if engine.draft is None else replace(engine, draft=str(find(engine.draft, screen).folder))


@contextmanager
def open_session(ref: ModelRef, answer: AnswerFlags, sampling: SamplingFlags, engine: RunFlags, screen: Screen, *, raw: bool = False,
                 ignore_eos: bool = False) -> Iterator[Session]:
    """A session on a loaded model. Every flag is judged before the weights are read."""
    from ..runtime.session import Session
    from ..runtime.stream_filters import StopStrings

    settings, max_tokens, stops = sampling.settings(ref.folder, screen.note), answer.max_tokens, StopStrings(answer.stop or ()).stops
    with loaded(ref, engine.options(overflow=answer.overflow), screen) as model:
        yield Session(model.engine, model.tokenizer, settings, system=answer.system, think=answer.think or "auto", stops=stops,
                      max_tokens=max_tokens, raw=raw, ignore_eos=ignore_eos)
