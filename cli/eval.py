"""`effllm eval`: the quality loss of a model, or of a packed KV cache, on a text, and where a packed cache needs its bits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import UsageError
from .flags import add_command, flag, token_count
from .help import PlainGroup
from .loading import final_result, find_model, find_model_variant, open_model, quantized_on_load
from .options import MEMORY, TEXT, EngineFlags, Json, Lora, Model, Sample, Threads, WeightFlags
from .prompt import read_file, read_stream
from .screen import Screen

if TYPE_CHECKING:
    from ..runtime.catalog import ModelRef
    from ..runtime.engine import Engine, EngineOptions
    from ..runtime.measuring.evaluate import KldResult
    from ..runtime.measuring.recall import RecallResult

WINDOW = 1024  # tokens, without -c: long enough for most tokens to have a context

PPL_EXAMPLES = """examples

  effllm eval ppl fable --text story.txt
"""
KLD_EXAMPLES = """examples

  effllm eval kld fable --text story.txt
  effllm eval kld ./my-model --against ./my-model-original --text story.txt --json
  effllm eval kld fable --text story.txt --kv 4bit --by-token
  effllm eval kld ./my-model --lora ./my-adapter --text story.txt  # what the adapter changes
"""

PROFILE_EXAMPLES = """examples

  effllm eval kv-profile fable
  effllm eval kv-profile ./my-model --text notes.txt --seconds 120
"""

RECALL_EXAMPLES = """examples

  effllm eval recall fable --text story.txt --kv 4bit -c 2048
"""

Text = Annotated[str, flag(TEXT, "--text", "FILE", "the text to score, - is standard input")]
Seconds = Annotated[float | None, flag(TEXT, "--seconds", "S", "approximate time limit in seconds (60)")]
Samples = Annotated[int, flag(TEXT, "--samples", "N", "samples with facts and questions at each distance (8)")]
Against = Annotated[str | None, flag(TEXT, "--against", "MODEL",
                                     "the reference model (the same model as stored, with a 32-bit cache and no adapter)")]
ByToken = Annotated[bool, flag(TEXT, "--by-token", "", "process one token at a time, as in decoding; slower")]


@dataclass(frozen=True)
class WindowFlags(EngineFlags):
    """How a model runs that scores a text in windows."""

    ctx: Annotated[int | None, flag(MEMORY, "-c --ctx-size --ctx", "N",
                                    "context and window size in tokens, 16k is 16384 (1024, or the model's if less)"), token_count] = None
    lora: Lora = None


def register(app: typer.Typer) -> None:
    group = typer.Typer(cls=PlainGroup, rich_markup_mode=None, help="Measure quality on a text.")
    add_command(group, "ppl", "commands", ppl, PPL_EXAMPLES)
    add_command(group, "kld", "commands", kld, KLD_EXAMPLES)
    add_command(group, "kv-profile", "commands", kv_profile, PROFILE_EXAMPLES)
    add_command(group, "recall", "commands", recall, RECALL_EXAMPLES)
    app.add_typer(group, name="eval", rich_help_panel="measure")


def ppl(context: typer.Context, model: Model, text: Text, engine: WindowFlags, weights: WeightFlags, json: Json = False) -> None:
    """Perplexity over separate windows of -c tokens (1024)."""
    from ..runtime.measuring.evaluate import PerplexityResult, perplexity

    screen = Screen(context.obj)
    screen.environment.require_stdout()
    content = read_text(text, screen)
    requested = find_model_variant(model, screen)
    options = window_options(requested, engine, screen)
    with quantized_on_load(requested, weights, screen, options) as ref, open_model(ref, options, screen) as opened:
        result = final_result(perplexity(opened.engine, opened.tokenizer, content, opened.engine.n_ctx, source_name(text)), screen,
                             PerplexityResult)
    if json:
        screen.json(result.to_json())
    else:
        screen.pairs((("tokens", str(result.tokens)), ("perplexity", f"{result.ppl:.4f} ± {result.ppl_error:.4f}")))


def kld(context: typer.Context, model: Model, text: Text, engine: WindowFlags, weights: WeightFlags, against: Against = None,
        by_token: ByToken = False, json: Json = False) -> None:
    """KL divergence of next-token probabilities from those of a reference model."""
    from dataclasses import replace

    from ..runtime.config import read_config
    from ..runtime.engine import Engine
    from ..runtime.measuring.evaluate import KldResult, open_reference, refuse_other_tokenizer
    from ..runtime.measuring.evaluate import kld as compare

    screen = Screen(context.obj)
    screen.environment.require_stdout()
    content = read_text(text, screen)
    requested = find_model_variant(model, screen)
    reference_ref = find_model(against, screen) if against else requested  # with --bits, the reference is the model as stored
    options = window_options(requested, engine, screen)
    read_config(reference_ref.folder, options.strict)  # with --strict, an unknown key of the reference is an error too
    if against:
        refuse_other_tokenizer(requested.folder, reference_ref.folder)
    with quantized_on_load(requested, weights, screen, options) as ref, open_model(ref, options, screen) as opened:
        options_of_reference = replace(reference_options(options, opened.engine, reference_ref.folder == ref.folder),
                      lora=())  # the reference has no adapters: their effect is measured
        reference = final_result(open_reference(reference_ref.folder, options_of_reference, opened.engine), screen, Engine)
        try:
            comparing = compare(opened.engine, reference, opened.tokenizer, content, opened.engine.n_ctx, source_name(text), by_token)
            result, packed = final_result(comparing, screen, KldResult), opened.engine.cache.is_packed
        finally:
            reference.close()
    if json:
        screen.json(result.to_json())
        return
    screen.pairs((
        ("tokens", str(result.tokens)),
        ("reference", f"{reference_ref.text}, its cache at {options_of_reference.kv}"),
        ("perplexity", f"{result.ppl:.4f}, reference {result.ppl_ref:.4f}"),
        ("KL divergence", f"mean {result.kld_mean:.3g}, median {result.kld_median:.3g}"),
        ("", f"99% below {result.kld_p99:.3g}, 99.9% below {result.kld_p999:.3g}"),
        ("noise floor", f"mean {result.floor_kld_mean:.3g} (the reference against itself)"),
        ("same top token", f"{100 * result.same_top:.2f}%"),
        ("cache", describe_bits(result, packed)),
        ("weights", f"{result.weight_bits_per_value:.3g} bits per value"),
    ))


def kv_profile(context: typer.Context, model: Model, text: Sample = None, seconds: Seconds = None, threads: Threads = None,
               json: Json = False) -> None:
    """Record where a packed cache needs its bits; --kv 8bit to 2bit then use that record."""
    from ..runtime.calibrate import built_in_text
    from ..runtime.kv.kv_profile import Profile
    from ..runtime.kv.kv_profile_run import profile_report, record_profile
    from ..runtime.kv.kv_recording import DEFAULT_SECONDS
    from ..runtime.library.external_models import require_place_beside

    screen = Screen(context.obj)
    if seconds is not None and not seconds > 0:
        raise UsageError(f"--seconds must be more than 0, not {seconds:g}", "leave it out for 60")
    content = built_in_text() if text is None else read_text(text, screen)
    ref = find_model(model, screen)
    require_place_beside(ref.folder, screen.environment.variables)
    source = "the sample" if text is None else source_name(text)
    profile = final_result(record_profile(ref.folder, content, seconds or DEFAULT_SECONDS, threads, source), screen, Profile)
    facts = profile_report(profile, ref.folder)
    if json:
        screen.json(facts)
        return
    screen.pairs((("profile", facts["file"]), ("recorded on", f"{facts['tokens']} tokens"), *(
        (f"{mean} bits", f"K {low_k} to {high_k}, V {low_v} to {high_v}; " + (
            "no layer in the sample reads packed pages" if gain is None else f"noise {gain:.2f} times that of uniform bits"))
        for mean, ((low_k, high_k), (low_v, high_v), gain) in facts["presets"].items()),
        ("stay exact", "the first {} tokens and the newest {}".format(*profile.ends)),
        *((f"{check['bits']} bits checked", f"KL divergence {check['kld']:.2g}, {check['flips']:.2%} of the top tokens changed")
          for check in facts["checks"]),
        ("--kv auto", f"{profile.auto}bit" if profile.auto is not None else "16bit: none of the bit widths checked preserved its output"
         if profile.checks else "16bit: nothing was checked")))


def recall(context: typer.Context, model: Model, text: Text, engine: WindowFlags, weights: WeightFlags, samples: Samples = 8,
           json: Json = False) -> None:
    """Ask for numbers stated far back: how many answers are right with this cache, and with an exact one."""
    from ..runtime.engine import Engine
    from ..runtime.measuring.evaluate import open_reference
    from ..runtime.measuring.recall import RecallResult
    from ..runtime.measuring.recall import recall as ask

    screen = Screen(context.obj)
    screen.environment.require_stdout()
    if samples < 1:
        raise UsageError(f"--samples {samples} is too few", "at least 1")
    content = read_text(text, screen)
    requested = find_model_variant(model, screen)
    options = window_options(requested, engine, screen)
    with quantized_on_load(requested, weights, screen, options) as ref, open_model(ref, options, screen) as opened:
        options_of_reference = reference_options(options, opened.engine, True)
        reference = final_result(open_reference(ref.folder, options_of_reference, opened.engine), screen, Engine)
        try:
            running = ask(opened.engine, reference, opened.tokenizer, content, opened.engine.n_ctx, samples, source_name(text))
            result, packed = final_result(running, screen, RecallResult), opened.engine.cache.is_packed
        finally:
            reference.close()
    if json:
        screen.json(result.to_json())
        return
    rows = []
    for row in result.rows:
        unsure = "" if row.comparable else ": the model itself is uncertain here"
        rows.append((f"facts in the first {row.spread:.0%}",
                     f"{row.right:.1%} of {row.tokens} tokens right, {row.right_exact:.1%} with an exact cache{unsure}"))
    screen.pairs((*rows, ("cache", describe_bits(result, packed))))


def describe_bits(result: KldResult | RecallResult, packed: bool) -> str:
    """Bits per value of the measured cache as text, with those of its packed part."""
    return f"{result.kv_bits_per_value:.3g} bits per value overall" + (f", {result.packed_bits:.3g} packed" if packed else "")


def window_options(ref: ModelRef, engine: EngineFlags, screen: Screen) -> EngineOptions:
    """Engine options with the window as context: -c, else WINDOW or the model's context if that is shorter."""
    from ..runtime.measuring.evaluate import windowed_options

    options, notices = windowed_options(engine.options(), ref.folder, WINDOW)
    for notice in notices:
        screen.note(notice)
    return options


def reference_options(options: EngineOptions, measured: Engine, same_weights: bool) -> EngineOptions:
    """The options of the reference run: an exact cache, with the sink and window of the measured run so that prompts are split into the
    same chunks. Raw weights, and a reference with other weights, keep float32 activations, as with `--exact`. Flags that only concern the
    measured run are dropped, as they would be reported as useless; so is `strict`, since placement does not change results."""
    from dataclasses import replace

    from ..runtime.source import is_low_bit

    ends = {"kv_sink": measured.cache.shape.sinks, "kv_window": measured.prepared.window}
    exact = options.exact or not (same_weights and is_low_bit(measured.prepared.folder))
    return replace(options, kv="32bit", **ends, kv_ram=None, kv_read="exact", strict=False, exact=exact,
                   from_settings=options.from_settings | ends.keys(),
                   kernel=options.kernel if same_weights else "auto")


def read_text(source: str, screen: Screen, flag: str = "--text") -> str:
    """The text to score. Raises UsageError, naming the file and the `flag`, if it is missing, empty or not text."""
    text = read_stream(screen.environment.stdin) if source == "-" else read_file(Path(source), flag)
    if not text.strip():
        raise UsageError(f"{source_name(source)} is empty", f"{flag} takes the path of a text file, or - for standard input")
    return text


def source_name(source: str) -> str:
    return "standard input" if source == "-" else source
