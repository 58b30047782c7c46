"""Opens the model that a command line names: resolves the name, reads the tokenizer, loads the weights with progress.

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
from .prompt import check_encoding
from .screen import Screen

if TYPE_CHECKING:
    from ..runtime.catalog import Absent, ModelRef
    from ..runtime.engine import Engine, EngineOptions
    from ..runtime.session import Session
    from ..runtime.tokenizer import Tokenizer
    from .options import AnswerFlags, BitsFlag, RunFlags, SamplingFlags, SessionFlags

Result = TypeVar("Result")


@dataclass(frozen=True)
class OpenedModel:
    """A model ready to answer, closed by the context that yielded it (`open_model`)."""

    engine: Engine
    tokenizer: Tokenizer


def find_model(model: str, screen: Screen) -> ModelRef:
    """The local model of that name, for commands that do not quantize on load. Raises ModelNotFound, and UsageError for a name that ends in
    a format (`:4bit`)."""
    ref = find_model_variant(model, screen)
    if ref.variant:
        from ..runtime.stores.container import refuse_quantized

        refuse_quantized(ref.folder, model.rpartition(":")[0], f":{ref.variant}")
        raise UsageError(f"{model} would be quantized as it is loaded, which this command does not do",
                         f"leave out :{ref.variant}, or make a folder of it: "
                         f"effllm quantize {typed(model.rpartition(':')[0])} -o DIR --spec {ref.variant}")
    return ref


def find_model_variant(model: str, screen: Screen) -> ModelRef:
    """The local model of that name, which may end in a format: for commands that continue with `quantized_on_load`. Raises ModelNotFound,
    with a hint if a prompt was given in place of the name."""
    from ..runtime.catalog import resolve
    from ..runtime.library.model_name import PROGRAM_NAME, spells_path

    if " " in model.strip() and not spells_path(model) and not os.path.exists(model) and not PROGRAM_NAME.match(model):
        raise ModelNotFound(f"{shortened(model)!r} is not a model: the model comes first, then the prompt",
                            f"effllm run fable {quote_prompt(shortened(model))}")
    ref = resolve(model, screen.environment.variables)
    if ref.notice:
        screen.note(ref.notice)
    return ref


def find_or_absent(model: str, screen: Screen, yes: bool) -> ModelRef | Absent:
    """`find_model_variant` for commands that offer to download a missing model: they check everything else before, then call
    `pull_if_absent`. Raises Absent if nobody can be asked."""
    from ..runtime.catalog import Absent

    try:
        return find_model_variant(model, screen)
    except Absent as absent:
        if not yes and not screen.environment.is_interactive:
            raise
        return absent


def pull_if_absent(resolved: ModelRef | Absent, weights: WeightFlags, options: EngineOptions, screen: Screen, yes: bool) -> ModelRef:
    """The model, downloaded now if it is missing and the user agrees. `options`: of the run, which is planned before the download."""
    from ..runtime.catalog import Absent
    from .pull import offer_download

    if not isinstance(resolved, Absent):
        return resolved
    bits = requested_bits(resolved.reference.text, resolved.reference.variant, weights)
    options = replace(options, draft=None)  # its vocabulary can only be compared after the download
    return offer_download(resolved, bits, "bits" in weights.from_settings and resolved.reference.variant is None, screen, yes, options)


def with_mmproj(ref: ModelRef, mmproj: str | None, screen: Screen) -> ModelRef:
    """The model with the --mmproj file, which is checked before weights are read. Raises EffllmError for one that does not match. An
    unsupported projector that another program stores with the model is ignored with a note: text works without it."""
    if mmproj is None and ref.mmproj is None:
        return ref
    from ..runtime.config import read_config
    from ..runtime.images.media import check_modality
    from .attachment import expand_path

    if mmproj is None:
        try:
            check_modality(ref.whole, read_config(ref.whole), ref.mmproj, None)
        except EffllmError as error:
            screen.note(f"{ref.text} cannot take images here: {error.message}")
            return replace(ref, mmproj=None)
        return ref
    path = str(expand_path(mmproj))
    check_modality(ref.whole, read_config(ref.whole), path, None)
    return replace(ref, mmproj=path)


def requested_bits(text: str, variant: str | None, weights: BitsFlag) -> str | None:
    """The format to quantize to: from the model's name (`variant`), else --bits; None for the stored weights. Raises UsageError if both
    were typed and differ, for an unknown format, and for --keep without one."""
    bits = None if weights.bits is None or (variant and "bits" in weights.from_settings) else f"{weights.bits}bit"
    if variant and bits and variant != bits:
        raise UsageError(f"{text} and --bits {weights.bits} disagree", "give one of them", "bits")
    if (requested := bits or variant) is not None:
        from ..runtime.conversion.on_load import check_format

        check_format(requested)
    elif isinstance(weights, WeightFlags) and weights.keep and "keep" not in weights.from_settings:
        from ..runtime.library.model_name import names_format

        if names_format(text):  # these weights are kept already
            return None
        raise UsageError("--keep keeps the weights that --bits quantizes", f"effllm run {typed(text)} --bits 4 --keep")
    return requested


def effective_bits(ref: ModelRef, weights: BitsFlag, screen: Screen) -> str | None:
    """`requested_bits` of a local model. If the model is quantized already, a default from a variable or a settings file is ignored with a
    note, and a typed format is an error."""
    bits = requested_bits(ref.text, ref.variant, weights)
    if bits is None:
        return None
    from ..runtime.source import is_low_bit
    from ..runtime.stores.container import read_container, refuse_quantized

    is_general_default = "bits" in weights.from_settings and ref.variant is None
    if (container := read_container(ref.folder)) is None and not (is_general_default and is_low_bit(ref.folder)):
        return bits
    from ..runtime.conversion import on_load

    if on_load.find_stored(on_load.Request(ref, bits, screen.environment.models_folder)):  # made by an earlier run or pull
        return bits
    if not is_general_default:
        suffix = f":{ref.variant}" if ref.variant else "--bits"
        refuse_quantized(ref.folder, ref.text.removesuffix(suffix), suffix)
    from .settings import origin

    quantization = container.spec_text if container else "by another tool"
    screen.note_once(f"{ref.text} is quantized already ({quantization}): bits of {origin(screen.environment, 'bits')} is ignored")
    return None


def check_flags(answer: AnswerFlags, sampling: SamplingFlags, engine: RunFlags, saving: SessionFlags) -> None:
    """Raise UsageError for flags that are invalid for every model, before one is loaded or quantized."""
    from ..offload.size import parse_size
    from ..runtime.sessions.session_name import check_name
    from ..runtime.sessions.session_store import DEFAULT_BUDGET
    from ..runtime.tokens.stream_filters import StopStrings

    sampling.over({})
    StopStrings(answer.stop or ())
    answer.constraint()
    for text, flag_name in ((answer.system or "", "--system"), *((stop_text, "--stop") for stop_text in answer.stop or ())):
        check_encoding(text, flag_name)
    token_limit(answer.predict)
    token_limit(answer.reasoning_budget, "--reasoning-budget")
    options = engine.options(overflow=answer.overflow)
    for size in (options.ram, options.vram, options.kv_ram, options.disk, saving.session_disk or DEFAULT_BUDGET):
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
def quantized_on_load(ref: ModelRef, weights: WeightFlags, screen: Screen, options: EngineOptions,
                      needs_tokenizer: bool = True) -> Iterator[ModelRef]:
    """A context that yields the model to load: as stored, or quantized to --bits or to the format in its name.

    Quantized weights come from an earlier run with --keep, or are made now: kept with --keep, otherwise only until the context ends. Before
    that, errors of planning with `options` are raised, and that of a missing tokenizer if `needs_tokenizer`.
    """
    bits = effective_bits(ref, weights, screen)
    if bits is None:
        yield ref
        return
    from ..runtime.conversion import on_load
    from ..runtime.convert import Converted
    from ..runtime.planning.compile_kernels import compile_needed
    from ..runtime.planning.forecast import check_plan
    from ..runtime.planning.needed_kernels import on_load_kinds
    from ..runtime.pull.disk import disk_errors

    held_tokenizer = None
    if needs_tokenizer:
        from ..runtime import session  # noqa: F401  (the plan counts it as memory of the run, like the tokenizer)

        held_tokenizer = read_tokenizer(ref.folder, options)
    request = on_load.Request(ref, bits, screen.environment.models_folder, weights.keep, options.threads)
    if stored := on_load.find_stored(request):
        screen.note(f"{bits} weights from {stored}")
        yield replace(ref, folder=stored, seen_from=ref.folder)
        return
    check_plan(ref.folder, bits, options)
    del held_tokenizer
    # Kernels for quantizing and for the run together, so that compiling uses every core.
    list(show_progress(compile_needed(on_load_kinds(ref.folder, bits, options)), screen, type(None)))
    if weights.keep:
        with disk_errors(request.folder.parent, "XDG_DATA_HOME", lambda: 0):
            request.folder.parent.mkdir(parents=True, exist_ok=True)
        final_result(on_load.quantize_on_load(request, request.folder), screen, Converted)
        yield replace(ref, folder=request.folder, seen_from=ref.folder)
    else:
        with on_load.temporary_folder() as folder:
            final_result(on_load.quantize_on_load(request, folder / "model"), screen, Converted)
            yield replace(ref, folder=folder / "model", seen_from=ref.folder)


def quote_prompt(text: str) -> str:
    """A prompt as it would be typed; shell-quoted if necessary."""
    return f'"{text}"' if set(text).isdisjoint('"$`\\!') else typed(text)


def shortened(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


@contextmanager
def open_model(ref: ModelRef, options: EngineOptions, screen: Screen, with_media: bool = False) -> Iterator[OpenedModel]:
    """A context that yields a model with its weights loaded, and closes it at the end. `with_media`: reserve memory for the media encoders,
    if the model has any. In a worker, the memory is negotiated with the router first."""
    tokenizer = tokenizer_of(ref, options)
    for remark in tokenizer.warnings:
        screen.note(remark)
    if with_media:
        options = replace(options, encoder_path=str(ref.whole), mmproj=ref.mmproj)
    if screen.environment.router_link is not None:
        options = screen.environment.router_link.negotiate(ref.folder, options)
    engine = open_with_progress(ref.folder, options, screen)
    try:
        from ..runtime.images.media import open_media

        engine.media = open_media(ref.whole, engine.config, ref.mmproj, options.threads)
        yield OpenedModel(engine, tokenizer)
    finally:
        engine.close()


def read_tokenizer(folder: Path, options: EngineOptions) -> Tokenizer:
    from ..runtime.config import read_config
    from ..runtime.tokenizer import Tokenizer

    return Tokenizer.load(folder, read_config(folder, options.strict))


def tokenizer_of(ref: ModelRef, options: EngineOptions) -> Tokenizer:
    """The tokenizer of a model. If it has no chat template, the built-in format that matches Ollama's template for the model is used."""
    tokenizer = read_tokenizer(ref.folder, options)
    if tokenizer.template is not None or ref.go_template is None:
        return tokenizer
    from ..runtime.files.bounded_read import read_bounded
    from ..runtime.templates.ollama_templates import detect_format, install_template
    from ..runtime.templates.template import SOURCE_LIMIT

    try:
        chat_format = detect_format(read_bounded(ref.go_template, SOURCE_LIMIT).decode("utf-8", "replace"))
    except OSError:
        chat_format = None
    if chat_format is not None:
        install_template(tokenizer, chat_format)
        tokenizer.warnings = (*tokenizer.warnings, f"the file has no chat template: using that of {chat_format}, which matches Ollama's")
    return tokenizer


def load_text_modules(folder: Path, options: EngineOptions) -> Tokenizer | None:
    """Load what a run has in memory when it plans, so that a plan counts the same: the session's modules and the tokenizer, which for
    128,000 tokens takes as much as a small model. None for a model without a tokenizer, which only a run refuses."""
    from ..runtime import session  # noqa: F401

    try:
        return read_tokenizer(folder, options)
    except EffllmError:
        return None


def open_with_progress(folder: Path, options: EngineOptions, screen: Screen) -> Engine:
    from ..runtime.engine import Engine, open_engine

    return final_result(open_engine(folder, options), screen, Engine)


def show_progress(items: Iterable[object], screen: Screen, result_type: type[Result]) -> Iterator[Result]:
    """Show the progress and notices that an iterator yields, and yield its items of type `result_type`. The progress line is cleared before
    each of them, and before an error."""
    from ..runtime.events import Notice, Progress

    try:
        for item in items:
            if isinstance(item, Progress):
                screen.progress(item)
            elif isinstance(item, Notice):
                if not item.is_detail:
                    screen.note_once(item.text)
            elif isinstance(item, result_type):
                screen.clear()
                yield item
    finally:
        screen.clear()


@contextmanager
def resumable(screen: Screen, out: Path) -> Iterator[None]:
    """A context for work that the same command can resume after Ctrl-C, which is noted. If the folder `out` was already complete then, the
    note says that instead, since the same command would be refused."""
    before = file_identity(out)
    try:
        yield
    except KeyboardInterrupt:
        is_whole = file_identity(out) not in (None, before)
        screen.note(f"stopped; {out} is already complete" if is_whole else
                    "stopped; progress is saved, the same command continues from here")
        raise


def file_identity(path: Path) -> tuple[int, int] | None:
    """(device, inode) of a file or folder, to tell it from a later one of the same name; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def final_result(items: Iterable[object], screen: Screen, result_type: type[Result]) -> Result:
    """The last result of an iterator whose progress and notices are shown."""
    *_, result = show_progress(items, screen, result_type)
    return result


def resolve_draft(engine: RunFlags, screen: Screen) -> RunFlags:
    """The flags with the name of the draft model resolved to its folder. One from settings that cannot be found is left out with a note."""
    if engine.draft is None:
        return engine
    try:
        return replace(engine, draft=str(find_model(engine.draft, screen).folder))
    except EffllmError as error:
        error.option = "draft"
        if "draft" not in engine.from_settings:
            raise
        from .settings import describe_origin

        where = describe_origin(screen.environment, "draft")
        if engine.strict:
            error.prefix_origin(where)
            raise
        screen.note(f"{where}: {error.message}; left out")
        return replace(engine, draft=None, from_settings=engine.from_settings - {"draft"})


@contextmanager
def open_session(ref: ModelRef, answer: AnswerFlags, sampling: SamplingFlags, engine: RunFlags, screen: Screen, *, raw: bool = False,
                 ignore_eos: bool = False, with_media: bool = True) -> Iterator[Session]:
    """A context that yields a session on a loaded model. `with_media`: reserve memory for its media encoders. All flags are checked before
    the weights are read."""
    from ..runtime.session import Session
    from ..runtime.tokens.stream_filters import StopStrings

    settings, max_tokens = sampling.settings(ref.folder, screen.note), answer.max_tokens
    stop_strings, constraint = StopStrings(answer.stop or ()).stops, answer.constraint()
    with open_model(ref, engine.options(overflow=answer.overflow), screen, with_media) as model:
        think, max_reasoning_tokens = reasoning_options(answer, model.tokenizer.thinks)
        yield Session(model.engine, model.tokenizer, settings, system=answer.system, think=think, stops=stop_strings,
                      max_tokens=max_tokens, raw=raw, ignore_eos=ignore_eos, constraint=constraint,
                      max_reasoning_tokens=max_reasoning_tokens)


def reasoning_options(answer: AnswerFlags, supports_reasoning: bool) -> tuple[str, int | None]:
    """(whether answers begin with reasoning: auto, on or off; the maximum tokens of reasoning, None for no limit). For a model without
    reasoning, values from settings are ignored; typed flags are kept, so that they are reported as errors."""
    ignored = frozenset() if supports_reasoning else answer.from_settings
    think = None if "think" in ignored else answer.think
    return think or "auto", None if "reasoning_budget" in ignored else answer.max_reasoning_tokens
