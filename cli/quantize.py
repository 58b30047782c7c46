"""`effllm quantize MODEL -o OUT --bits N`: a smaller model, and its quality loss."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .. import EffllmError, UsageError, typed
from ..runtime.conversion import METHODS, PLAIN
from .eval import WINDOW, read_text, source_name
from .flags import add_command, flag, is_typed
from .loading import final_result, find_model, open_with_progress, resumable
from .options import OUTPUT, Json, Model, Threads
from .screen import Screen

if TYPE_CHECKING:
    from ..runtime.catalog import ModelRef
    from ..runtime.conversion.convert_plan import ConversionPlan
    from ..runtime.convert import Converted, ConvertOptions
    from ..runtime.measuring.evaluate import KldResult

FORMAT, CALIBRATION, MEASURE = "format", "calibration", "measurement"
EXAMPLES = """examples

  effllm quantize ./my-model -o ./my-model-4bit --bits 4
  effllm quantize ./my-model -o ./small --spec affine3:64 --tensor-type down_proj=4bit --method gptq
  effllm quantize fable -o ./fable-3bit --bits 3 --eval story.txt
  effllm quantize ./my-model -o ./my-model-4bit --bits 4 --dry-run
  effllm quantize ./my-relu-model -o ./neurons --bundle-ffn
"""

Out = Annotated[str, flag(OUTPUT, "-o --out", "DIR", "the output folder")]
Bits = Annotated[int | None, flag(FORMAT, "--bits", "8|6|5|4|3|2", "bits per weight, in the best format for that many")]
Spec = Annotated[str | None, flag(FORMAT, "--spec", "SPEC", "a format by name: 4bit, ternary, codebook4:16, affine4:64, symmetric8:32",
                                         "quantize")]
TensorType = Annotated[list[str] | None, flag(FORMAT, "--tensor-type", "REGEX=SPEC",
                                              "another format for tensors whose name matches; may be repeated, the last match wins")]
Target = Annotated[str | None, flag(FORMAT, "--target", "4.25bpw", "choose each tensor's format by measured error, to reach this average")]
Method = Annotated[str | None, flag(FORMAT, "--method", "|".join(METHODS), f"the quantization method ({PLAIN})")]
BundleFfn = Annotated[bool, flag(FORMAT, "--bundle-ffn", "",
                                 "keep the values, but lay out a ReLU model so that each neuron can be read alone")]
GateSparsity = Annotated[float | None, flag(FORMAT, "--gate-sparsity", "SHARE",
                                            "with --bundle-ffn, for other models: count this share of gates as zero (lossy)")]
GateRule = Annotated[Literal["weighed", "magnitude"] | None, flag(FORMAT, "--gate-rule", "weighed|magnitude",
                                                                  "which gates count as zero: by size weighed with their neuron, or by "
                                                                  "size alone (weighed)")]
Calib = Annotated[str | None, flag(CALIBRATION, "--calib", "FILE", "text for the methods that need one, - is standard input (a sample)")]
CalibTokens = Annotated[int | None, flag(CALIBRATION, "--calib-tokens", "N", "maximum tokens of it to use (16384)")]
Eval = Annotated[str | None, flag(MEASURE, "--eval", "FILE", "score this text before and after, - is standard input")]
NoKvProfile = Annotated[bool, flag(CALIBRATION, "--no-kv-profile", "", "do not record where a packed KV cache needs its bits (a minute)")]
DryRun = Annotated[bool, flag(OUTPUT, "--dry-run", "", "print the sizes and write nothing")]
Force = Annotated[bool, flag(OUTPUT, "--force", "", "replace a folder that effllm quantize made", "quantize")]


def register(app: typer.Typer) -> None:
    add_command(app, "quantize", "convert models", quantize, EXAMPLES)


def quantize(context: typer.Context, model: Model, out: Out, bits: Bits = None, spec: Spec = None, tensor_type: TensorType = None,
             target: Target = None, method: Method = None, calib: Calib = None, calib_tokens: CalibTokens = None, eval: Eval = None,
             bundle_ffn: BundleFfn = False, gate_sparsity: GateSparsity = None, gate_rule: GateRule = None,
             no_kv_profile: NoKvProfile = False,
             threads: Threads = None, dry_run: DryRun = False, force: Force = False, json: Json = False) -> None:
    """Make a smaller copy of a model, ready to run."""
    from ..runtime.conversion.convert_plan import ConversionPlan, plan_conversion
    from ..runtime.convert import Converted, calibration, check_target, convert, resolve_plan

    screen = Screen(context.obj)
    ref = find_model(model, screen)
    if calib == eval == "-":
        raise UsageError("--calib - and --eval - cannot both read standard input", "put one of the texts into a file")
    if dry_run and eval is not None:
        raise UsageError("--dry-run writes nothing that --eval could score", "leave one of them out")
    text = None if eval is None else read_eval_text(eval, ref, screen)
    bits, spec, target = prefer_typed(context, screen, bundle_ffn and is_typed(context, "bundle_ffn"), bits=bits, spec=spec, target=target)
    if gate_rule is not None and gate_sparsity is None:
        raise UsageError("--gate-rule needs --gate-sparsity", "give both, with --bundle-ffn")
    if bundle_ffn:
        check_bundling(bits, spec, target, tensor_type, method, calib if gate_sparsity is None else None, calib_tokens, dry_run)
        sample = None if calib is None else read_text(calib, screen, "--calib")
        register_unfinished(Path(out), screen)
        converted = bundle_model(ref, Path(out), force, gate_sparsity, gate_rule, sample, screen)
        register_finished(converted.folder, screen)  # before the profile, which takes a minute and may be stopped by Ctrl-C
        profile_s = None if no_kv_profile else record_kv_profile(converted.folder, sample, calib, threads, screen)
        report(converted, profile_s, ref, text, threads, screen, json)
        return
    if gate_sparsity is not None:
        raise UsageError("--gate-sparsity needs --bundle-ffn", "effllm quantize MODEL -o DIR --bundle-ffn --gate-sparsity 0.5")
    sample = None if calib is None else read_text(calib, screen, "--calib")
    options = conversion_options(ref, bits, spec, tensor_type, target, method=method, threads=threads, replace=force or None,
                                 calibration_text=sample, calibration_tokens=calib_tokens)
    if dry_run:
        check_target(Path(out).absolute(), force, wanted=options.spec_text)
        plan = plan_conversion(ref.folder, options.recipe, options.target is None)
        with plan.store:
            calibration(plan, options)  # raises what a run would raise
            if options.target is not None:  # formats are chosen by measured error, which needs kernels
                plan = final_result(resolve_plan(plan, options), screen, ConversionPlan)
            print_plan(plan, screen, json)
        return
    register_unfinished(Path(out), screen)
    with resumable(screen, Path(out)):
        converted = final_result(convert(ref.folder, Path(out), options), screen, Converted)
    register_finished(converted.folder, screen)
    profile_s = None if no_kv_profile else record_kv_profile(converted.folder, sample, calib, threads, screen)
    report(converted, profile_s, ref, text, threads, screen, json)


def report(converted: Converted, profile_s: float | None, ref: ModelRef, text: str | None, threads: int | None, screen: Screen,
           json: bool) -> None:
    """Score the new model with `text`, if there is one, and print the result."""
    quality = None if text is None else measure_quality(ref, converted, text, threads, screen)
    if json:
        screen.json(converted.to_json() | ({} if quality is None else {"eval": quality.to_json()}))
    else:
        print_result(converted, profile_s, quality, screen)


def prefer_typed(context: typer.Context, screen: Screen, is_bundling: bool, **sizes: object) -> tuple[Any, ...]:
    """The values of `sizes`. One from a variable is ignored with a note if another size or --bundle-ffn was typed."""
    typed = ["--bundle-ffn"] * is_bundling + [f"--{name}" for name in sizes if sizes[name] is not None and is_typed(context, name)]
    for name, value in sizes.items():
        if typed and value is not None and not is_typed(context, name):
            parameter = next(each for each in context.command.params if each.name == name)
            screen.note(f"{parameter.envvar} is ignored: {typed[0]} was typed")
            sizes[name] = None
    return tuple(sizes.values())


def check_bundling(*others: object) -> None:
    """Raises UsageError for flags that change values, which --bundle-ffn keeps. `others`: the value of --bits, then those of the flags."""
    bits, *other_flags = others
    if bits not in (None, 16) or any(other_flags):
        raise UsageError("--bundle-ffn keeps the weights as they are and goes with no other format, method or --dry-run",
                         "effllm quantize MODEL -o DIR --bundle-ffn, where MODEL may be quantized except for its neurons: "
                         "--tensor-type '(up|down)_proj=bf16'")


def bundle_model(ref: ModelRef, out: Path, replace: bool, gate_sparsity: float | None, gate_rule: str | None, text: str | None,
            screen: Screen) -> Converted:
    """The copy with bundled FFN weights."""
    from ..runtime.conversion.bundle_ffn import bundle
    from ..runtime.convert import Converted

    with resumable(screen, out):
        return final_result(bundle(ref.folder, out, replace, source_of(ref), gate_sparsity, text, gate_rule or "weighed"), screen,
                           Converted)


def conversion_options(ref: ModelRef, bits: int | None, spec: str | None, rules: Sequence[str] | None, target: str | None,
                       **options: object) -> ConvertOptions:
    """The options for the flags, checked before the model is read. Raises UsageError."""
    from ..runtime.convert import ConvertOptions, recipe_of, target_of

    sizes = [flag for flag, value in (("--bits", bits), ("--spec", spec), ("--target", target)) if value is not None]
    if len(sizes) > 1:
        raise UsageError(f"{' and '.join(sizes)} each set the size", "give one of them")
    if not sizes:
        raise UsageError("give --bits N, --spec SPEC or --target BPW", "effllm quantize MODEL -o DIR --bits 4")
    # --target starts from the default bits. A typed number is checked as it is, also 0.
    base = spec if spec is not None else "4bit" if bits is None else f"{bits}bit"
    recipe = recipe_of(base, rules or (), options["method"])
    target_bpw = None if target is None else target_of(target)
    description = " ".join([str(recipe.base) if target_bpw is None else f"{target_bpw:g}bpw", *(rules or ())])
    return ConvertOptions(recipe, description, target=target_bpw, source=source_of(ref),
                          **{key: value for key, value in options.items() if value is not None})


def source_of(ref: ModelRef) -> dict[str, object]:
    """The origin of a model, as recorded in its folder."""
    from ..runtime.source import licence_of

    source = {"model": ref.alias or ref.repo or ref.folder.resolve().name, "repo": ref.repo, "revision": ref.revision,
              "licence": ref.licence or licence_of(ref.folder)}
    return {key: value for key, value in source.items() if value is not None}


def register_unfinished(folder: Path, screen: Screen) -> None:
    """Register the folder for `effllm list` before it is complete, so that a kill cannot leave an unregistered one."""
    from ..runtime.library.storage import register

    with suppress(EffllmError):  # reported by `register_finished`
        register(screen.environment.variables, folder, is_made=False)


def register_finished(folder: Path, screen: Screen) -> None:
    """Register the folder for `effllm list`. A failure does not fail the conversion."""
    from ..runtime.library.storage import register

    try:
        register(screen.environment.variables, folder)
    except EffllmError as error:
        screen.note(f"effllm list will not show it: {error.message}")


def record_kv_profile(folder: Path, text: str | None, calib: str | None, threads: int | None, screen: Screen) -> float | None:
    """Record the KV cache profile of the new model on the text of --calib, else on the sample. Returns the seconds it took, None if there
    is no profile. A failure is only noted."""
    from time import monotonic

    from ..runtime.calibrate import built_in_text
    from ..runtime.config import read_config
    from ..runtime.kv.kv_profile import Profile
    from ..runtime.kv.kv_profile_run import DEFAULT_SECONDS, record_profile

    if not read_config(folder).cache_kv_heads:
        return None
    started = monotonic()
    screen.note(f"the weights are done; recording where a packed KV cache needs its bits, for about {DEFAULT_SECONDS:.0f} s at most "
                "(--no-kv-profile skips this)")
    source = "the sample" if calib is None else source_name(calib)
    try:
        final_result(record_profile(folder, built_in_text() if text is None else text, threads=threads, source=source), screen, Profile)
        return monotonic() - started
    except EffllmError as error:
        screen.note(f"no profile for --kv: {error.message}")
        return None
    except KeyboardInterrupt:
        screen.note(f"the model is complete; effllm eval kv-profile {typed(folder)} records the profile for --kv")
        raise


def read_eval_text(source: str, ref: ModelRef, screen: Screen) -> str:
    """The text of --eval. Raises UsageError for one that is too short to score."""
    from ..runtime.config import read_config
    from ..runtime.measuring.evaluate import windows
    from ..runtime.tokenizer import Tokenizer

    content, config = read_text(source, screen, "--eval"), read_config(ref.folder)
    windows(Tokenizer.load(ref.folder, config), content, min(WINDOW, config.max_position_embeddings), source_name(source), "--eval")
    return content


def measure_quality(ref: ModelRef, converted: Converted, text: str, threads: int | None, screen: Screen) -> KldResult | None:
    """Perplexity and KL divergence of the new model against the old one; None after a failure, which is only noted."""
    from ..runtime.config import read_config
    from ..runtime.engine import EngineOptions
    from ..runtime.measuring.evaluate import KldResult, kld
    from ..runtime.tokenizer import Tokenizer

    config = read_config(ref.folder)
    options = EngineOptions(threads=threads, kv="32bit", ctx=min(WINDOW, config.max_position_embeddings))
    try:
        tokenizer = Tokenizer.load(ref.folder, config)
        engine = open_with_progress(converted.folder, options, screen)
        try:
            reference = open_with_progress(ref.folder, options, screen)
            try:
                return final_result(kld(engine, reference, tokenizer, text, engine.n_ctx), screen, KldResult)
            finally:
                reference.close()
        finally:
            engine.close()
    except EffllmError as error:
        screen.note(f"not scored: {error.message}")
        return None


def print_plan(plan: ConversionPlan, screen: Screen, json: bool) -> None:
    """Print the planned sizes by class of tensors."""
    from ..offload.size import format_size

    rows = plan.rows()
    if json:
        screen.json({"weights": plan.weights, "bytes_before": plan.before, "bytes_after": plan.after, "file_bytes": plan.file_nbytes,
                     "bits_per_weight": plan.bits_per_weight, "files": [file.name for file in plan.files],
                     "classes": [row.to_json() for row in rows]})
        return
    for notice in plan.notices():
        screen.note(notice)
    screen.table(("tensors", "count", "weights", "format", "before", "after", "bits"),
                 [(row.name, str(row.tensors), f"{row.weights / 1e6:.2f} M", ", ".join(row.specs), format_size(row.before),
                   format_size(row.after), f"{row.bits_per_weight:.2f}") for row in rows]
                 + [("all", str(len(plan.jobs)), f"{plan.weights / 1e6:.2f} M", "", format_size(plan.before), format_size(plan.after),
                     f"{plan.bits_per_weight:.2f}")], right=(1, 2, 4, 5, 6))
    screen.line(f"{len(plan.files)} file{'s' if len(plan.files) > 1 else ''} of {format_size(plan.file_nbytes)}; nothing was written")


def print_result(converted: Converted, profile_s: float | None, quality: KldResult | None, screen: Screen) -> None:
    from ..offload.size import format_size
    from ..runtime.conversion.convert_estimate import human_time

    screen.table(("tensors", "format", "before", "after", "bits", "error"),
                 [(row.size.name, ", ".join(row.size.specs), format_size(row.size.before), format_size(row.size.after),
                   f"{row.size.bits_per_weight:.2f}", "" if row.error_db is None else f"{row.error_db:.1f} dB")
                  for row in converted.classes]
                 + [("all", "", format_size(converted.before), format_size(converted.after), f"{converted.bits_per_weight:.2f}", "")],
                 right=(2, 3, 4, 5))
    if quality is not None:
        screen.line()
        screen.pairs((("perplexity", f"{quality.ppl_ref:.4f} before, {quality.ppl:.4f} after"),
                      ("KL divergence", f"mean {quality.kld_mean:.3g}, median {quality.kld_median:.3g}, 99% below {quality.kld_p99:.3g}"),
                      ("same top token", f"{100 * quality.same_top:.2f}%")))
    profile_time = "" if profile_s is None else f", the profile of its KV cache in {human_time(profile_s)}"
    screen.note(f"{converted.folder}: made in {human_time(converted.seconds)}{profile_time}; {run_command(converted.folder)}")


def run_command(folder: Path) -> str:
    """The command that uses a model of this kind."""
    from ..runtime.config import read_config

    config = read_config(folder)
    if config.is_generative:
        return f"effllm run {typed(folder)}"
    return f"effllm serve {typed(folder)}" if config.listwise_reranker else f'effllm embed {typed(folder)} "a text"'
