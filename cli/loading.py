"""From a model name on the command line to a session: resolve, read the tokenizer, load the weights with progress.

Cheap checks come first: a missing tokenizer is reported before gigabytes are read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeVar

from .. import EffllmError, ModelNotFound, UsageError, typed
from .options import WeightFlags, token_limit
from .prompt import typed_text
from .screen import Screen

if TYPE_CHECKING:
    from ..runtime.catalog import Absent, ModelRef
    from ..runtime.engine import Engine, EngineOptions
    from ..runtime.session import Session
    from ..runtime.tokenizer import Tokenizer
    from .options import AnswerFlags, BitsFlag, RunFlags, SamplingFlags, SessionFlags

Result = TypeVar("Result")


@dataclass(frozen=True)
class LoadedSession:
    """A model ready to answer, closed by the context that yielded it (`loaded`)."""

    engine: Engine
    tokenizer: Tokenizer


def find(model: str, screen: Screen) -> ModelRef:
    """The model of that name, with its files present. A prompt in place of the name is recognized."""
    ref = find_any(model, screen)
    if ref.variant:
        from ..runtime.stores.container import refuse_quantized

        refuse_quantized(ref.folder, model.rpartition(":")[0], f":{ref.variant}")
        raise UsageError(f"{model} would be quantized as it is loaded, which this command does not do",
                         f"leave out :{ref.variant}, or make a folder of it: "
                         f"effllm quantize {typed(model.rpartition(':')[0])} -o DIR --spec {ref.variant}")
    return ref


def find_any(model: str, screen: Screen) -> ModelRef:
    """`find` for a command that continues with `at_precision`: the name may end in a format."""
    from ..runtime.catalog import resolve
    from ..runtime.library.model_name import OF_PROGRAM, spells_path

    if " " in model.strip() and not spells_path(model) and not os.path.exists(model) and not OF_PROGRAM.match(model):
        raise ModelNotFound(f"{shortened(model)!r} is not a model: the model comes first, then the prompt",
                            f"effllm run fable {in_quotes(shortened(model))}")
    ref = resolve(model, screen.environment.variables)
    if ref.notice:
        screen.note(ref.notice)
    return ref


def find_or_absent(model: str, screen: Screen, yes: bool) -> ModelRef | Absent:
    """`find_any` for a command that offers to download a missing model once everything else is checked: `pull_if_absent`."""
    from ..runtime.catalog import Absent

    try:
        return find_any(model, screen)
    except Absent as absent:
        if not yes and not screen.environment.is_interactive:
            raise
        return absent


def pull_if_absent(found: ModelRef | Absent, weights: WeightFlags, options: EngineOptions, screen: Screen, yes: bool) -> ModelRef:
    """The model, downloaded now if it is missing and the user agrees; `options`: how it is to run."""
    from ..runtime.catalog import Absent
    from .pull import offer

    if not isinstance(found, Absent):
        return found
    bits = requested_bits(found.reference.text, found.reference.variant, weights)
    options = replace(options, draft=None)  # whose vocabulary is compared when the model is here
    return offer(found, bits, "bits" in weights.settled and found.reference.variant is None, screen, yes, options)


def with_mmproj(ref: ModelRef, mmproj: str | None, screen: Screen) -> ModelRef:
    """The model with the --mmproj file, which is checked before weights are read. Raises EffllmError for one that does not match. An
    unsupported projector that another program stores with the model is ignored with a note: text works without it."""
    if mmproj is None and ref.mmproj is None:
        return ref
    from ..runtime.config import read_config
    from ..runtime.images.media import check_modality
    from .attachment import named_path

    if mmproj is None:
        try:
            check_modality(ref.whole, read_config(ref.whole), ref.mmproj, None)
        except EffllmError as error:
            screen.note(f"{ref.text} cannot take images here: {error.message}")
            return replace(ref, mmproj=None)
        return ref
    path = str(named_path(mmproj))
    check_modality(ref.whole, read_config(ref.whole), path, None)
    return replace(ref, mmproj=path)


def requested_bits(text: str, variant: str | None, weights: BitsFlag) -> str | None:
    """The format to quantize to, None for the stored weights: from the model's name (`variant`), else --bits. Raises UsageError if both
    were typed and differ, for an unknown format, and for --keep without one."""
    bits = None if weights.bits is None or (variant and "bits" in weights.settled) else f"{weights.bits}bit"
    if variant and bits and variant != bits:
        raise UsageError(f"{text} and --bits {weights.bits} disagree", "give one of them", "bits")
    if (wanted := bits or variant) is not None:
        from ..runtime.conversion.on_load import check_format

        check_format(wanted)
    elif isinstance(weights, WeightFlags) and weights.keep and "keep" not in weights.settled:
        from ..runtime.library.model_name import names_format

        if names_format(text):  # and is kept already
            return None
        raise UsageError("--keep keeps the weights that --bits quantizes", f"effllm run {typed(text)} --bits 4 --keep")
    return wanted


def bits_for(ref: ModelRef, weights: BitsFlag, screen: Screen) -> str | None:
    """`requested_bits` of a local model. A default from a variable or a settings file is ignored with a note if the model is quantized
    already; a typed one is an error then."""
    bits = requested_bits(ref.text, ref.variant, weights)
    if bits is None:
        return None
    from ..runtime.source import is_low_bit
    from ..runtime.stores.container import read_container, refuse_quantized

    for_all = "bits" in weights.settled and ref.variant is None
    if (made := read_container(ref.folder)) is None and not (for_all and is_low_bit(ref.folder)):
        return bits
    from ..runtime.conversion import on_load

    if on_load.find_stored(on_load.Request(ref, bits, screen.environment.models_folder)):  # such as what the pull before this run has made
        return bits
    if not for_all:
        asked = f":{ref.variant}" if ref.variant else "--bits"
        refuse_quantized(ref.folder, ref.text.removesuffix(asked), asked)
    from .settings import origin

    how = made.spec_text if made else "by another tool"
    screen.note_once(f"{ref.text} is quantized already ({how}): bits of {origin(screen.environment, 'bits')} is ignored")
    return None


def check_flags(answer: AnswerFlags, sampling: SamplingFlags, engine: RunFlags, saving: SessionFlags) -> None:
    """Raise what is wrong with the flags by themselves, before a model is loaded or quantized."""
    from ..offload.size import parse_size
    from ..runtime.sampler import SamplerSettings
    from ..runtime.sessions.session_name import check_name
    from ..runtime.sessions.session_store import DISK
    from ..runtime.tokens.stream_filters import StopStrings

    SamplerSettings.from_generation_config({}, **sampling.said())
    StopStrings(answer.stop or ())
    answer.constraint()
    for text, what in ((answer.system or "", "--system"), *((each, "--stop") for each in answer.stop or ())):
        typed_text(text, what)
    token_limit(answer.predict)
    token_limit(answer.reasoning_budget, "--reasoning-budget")
    options = engine.options(overflow=answer.overflow)
    for size in (options.ram, options.vram, options.kv_ram, options.disk, saving.session_disk or DISK):
        if size is not None:
            parse_size(size)
    if saving.session is not None:
        check_name(saving.session)


def terminal_stream(screen: Screen, model: str) -> TextIO:
    """The stream that echoes what is typed: stdout, else stderr. Raises UsageError if neither is a terminal."""
    environment = screen.environment
    visible = next((stream for stream in (environment.stdout, environment.stderr) if environment.is_terminal(stream)), None)
    if visible is None:
        raise UsageError("a chat needs a terminal to show what you type", f'effllm run {typed(model)} "your prompt"')
    return visible


@contextmanager
def at_precision(ref: ModelRef, weights: WeightFlags, screen: Screen, options: EngineOptions, text: bool = True) -> Iterator[ModelRef]:
    """The model as stored, or quantized to --bits or to the format in its name: cached, cached now, or for this run only. What planning
    with `options` would refuse is refused before, as is a model without a tokenizer if `text` is needed."""
    bits = bits_for(ref, weights, screen)
    if bits is None:
        yield ref
        return
    from ..runtime.conversion import on_load
    from ..runtime.convert import Converted
    from ..runtime.planning.compile_kernels import compile_needed
    from ..runtime.planning.forecast import check_plan
    from ..runtime.planning.needed_kernels import on_load_kinds
    from ..runtime.pull.disk import disk_errors

    held = None
    if text:
        from ..runtime import session  # noqa: F401  (part of a run's memory, like the tokenizer)

        held = read_tokenizer(ref.folder, options)
    request = on_load.Request(ref, bits, screen.environment.models_folder, weights.keep, options.threads)
    if kept := on_load.find_stored(request):
        screen.note(f"{bits} weights from {kept}")
        yield replace(ref, folder=kept, seen_from=ref.folder)
        return
    check_plan(ref.folder, bits, options)
    del held
    # what the run needs too: all at once, on every core
    list(follow(compile_needed(on_load_kinds(ref.folder, bits, options)), screen, type(None)))
    if weights.keep:
        with disk_errors(request.folder.parent, "XDG_DATA_HOME", lambda: 0):
            request.folder.parent.mkdir(parents=True, exist_ok=True)
        last(follow(on_load.quantize_on_load(request, request.folder), screen, Converted))
        yield replace(ref, folder=request.folder, seen_from=ref.folder)
    else:
        with on_load.temporary_folder() as folder:
            last(follow(on_load.quantize_on_load(request, folder / "model"), screen, Converted))
            yield replace(ref, folder=folder / "model", seen_from=ref.folder)


def in_quotes(text: str) -> str:
    """A prompt as it would be typed; shell-quoted if necessary."""
    return f'"{text}"' if set(text).isdisjoint('"$`\\!') else typed(text)


def shortened(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


@contextmanager
def loaded(ref: ModelRef, options: EngineOptions, screen: Screen, sees: bool = False) -> Iterator[LoadedSession]:
    """An engine with its weights loaded, closed at the end. A router is told when they are. `sees`: memory for the media encoders is
    reserved, if the model has any."""
    tokenizer = tokenizer_of(ref, options)
    for remark in tokenizer.remarks:
        screen.note(remark)
    if sees:
        options = replace(options, encoder_path=str(ref.whole), mmproj=ref.mmproj)
    if screen.environment.router_link is not None:
        options = screen.environment.router_link.negotiate(ref.folder, options)
    engine = open_with_progress(ref.folder, options, screen)
    try:
        from ..runtime.images.media import open_media

        engine.media = open_media(ref.whole, engine.config, ref.mmproj, options.threads)
        yield LoadedSession(engine, tokenizer)
    finally:
        engine.close()


def read_tokenizer(folder: Path, options: EngineOptions) -> Tokenizer:
    from ..runtime.config import read_config
    from ..runtime.tokenizer import Tokenizer

    return Tokenizer.load(folder, read_config(folder, options.strict))


def tokenizer_of(ref: ModelRef, options: EngineOptions) -> Tokenizer:
    """With the chat format of another program's template, if the model has no chat template."""
    tokenizer = read_tokenizer(ref.folder, options)
    if tokenizer.template is not None or ref.go_template is None:
        return tokenizer
    from ..runtime.files.bounded_read import read_bounded
    from ..runtime.templates.ollama_templates import detect_format, install_template
    from ..runtime.templates.template import SOURCE_LIMIT

    try:
        written = detect_format(read_bounded(ref.go_template, SOURCE_LIMIT).decode("utf-8", "replace"))
    except OSError:
        written = None
    if written is not None:
        install_template(tokenizer, written)
        tokenizer.remarks = (*tokenizer.remarks, f"the file has no chat template: using that of {written}, which matches Ollama's")
    return tokenizer


def load_text_modules(folder: Path, options: EngineOptions) -> Tokenizer | None:
    """Load what a run has in memory when it plans, so that the plan matches: the session's modules and the tokenizer, which for 128,000
    tokens takes as much as a small model. None for a model without a tokenizer, which a run refuses itself."""
    from ..runtime import session  # noqa: F401

    try:
        return read_tokenizer(folder, options)
    except EffllmError:
        return None


def open_with_progress(folder: Path, options: EngineOptions, screen: Screen) -> Engine:
    from ..runtime.engine import Engine, open_engine

    return last(follow(open_engine(folder, options), screen, Engine))


def follow(items: Iterable[object], screen: Screen, wanted: type[Result]) -> Iterator[Result]:
    """The results of an iterator that also yields progress and notices, which are shown. The progress line is always cleared before an
    error is shown."""
    from ..runtime.events import Notice, Progress

    try:
        for item in items:
            if isinstance(item, Progress):
                screen.progress(item)
            elif isinstance(item, Notice):
                if not item.is_detail:
                    screen.note_once(item.text)
            elif isinstance(item, wanted):
                screen.clear()
                yield item
    finally:
        screen.clear()


@contextmanager
def resumable(screen: Screen, out: Path) -> Iterator[None]:
    """Ctrl-C keeps finished work, and says so, also if it comes when the folder `out` has just got its name: the same command would then be
    refused."""
    before = identity(out)
    try:
        yield
    except KeyboardInterrupt:
        is_whole = identity(out) not in (None, before)
        screen.note(f"stopped; {out} is already complete" if is_whole else
                    "stopped; progress is saved, the same command continues from here")
        raise


def identity(place: Path) -> tuple[int, int] | None:
    """Identifies a file or folder, as opposed to a later one of the same name; None if there is none."""
    try:
        found = place.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def last(items: Iterable[Result]) -> Result:
    *_, result = items
    return result


def with_draft(engine: RunFlags, screen: Screen) -> RunFlags:
    """The flags with the draft model's name resolved to its folder."""
    if engine.draft is None:
        return engine
    try:
        return replace(engine, draft=str(find(engine.draft, screen).folder))
    except EffllmError as error:
        error.option = "draft"
        if "draft" not in engine.settled:
            raise
        from .settings import place

        where = place(screen.environment, "draft")
        if engine.strict:
            error.say_place(where)
            raise
        screen.note(f"{where}: {error.message}; left out")
        return replace(engine, draft=None, settled=engine.settled - {"draft"})


@contextmanager
def open_session(ref: ModelRef, answer: AnswerFlags, sampling: SamplingFlags, engine: RunFlags, screen: Screen, *, raw: bool = False,
                 ignore_eos: bool = False, sees: bool = True) -> Iterator[Session]:
    """A session on a loaded model, with memory for media if it `sees`. All flags are checked before the weights are read."""
    from ..runtime.session import Session
    from ..runtime.tokens.stream_filters import StopStrings

    settings, max_tokens, stops = sampling.settings(ref.folder, screen.note), answer.max_tokens, StopStrings(answer.stop or ()).stops
    constraint = answer.constraint()
    with loaded(ref, engine.options(overflow=answer.overflow), screen, sees) as model:
        asked, most = reasoning_options(answer, model.tokenizer.thinks)
        yield Session(model.engine, model.tokenizer, settings, system=answer.system, think=asked, stops=stops,
                      max_tokens=max_tokens, raw=raw, ignore_eos=ignore_eos, constraint=constraint, max_reasoning_tokens=most)


def reasoning_options(answer: AnswerFlags, thinks: bool) -> tuple[str, int | None]:
    """Whether answers begin with reasoning, and its token budget. Defaults from settings are dropped for a model without reasoning; typed
    flags stay, so that they are reported."""
    settled = frozenset() if thinks else answer.settled
    return (None if "think" in settled else answer.think) or "auto", None if "reasoning_budget" in settled else answer.max_reasoning_tokens
