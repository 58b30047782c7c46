"""The flags that commands share, in groups, and their conversion to EngineOptions and SamplerSettings.

A flag that was not given is None, which means the default of the dataclass it is converted to. Defaults are defined only there, because
importing them (NumPy, Numba) would slow `--help` down; tests/test_cli_help.py compares the defaults in the help texts with them. Flags are
named as in llama.cpp where it has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .. import UsageError
from .flags import flag, flags_of, names_and_types, token_count, word_completer

if TYPE_CHECKING:
    from ..runtime.constraints.constraint import Constraint
    from ..runtime.engine import EngineOptions
    from ..runtime.sampler import SamplerSettings

COMPUTE, MEMORY, CACHE, ANSWER, TOOLS, OUTPUT, TEXT = "compute", "memory", "KV cache", "answer", "tools", "output", "text"
SAMPLING = "sampling (unset: the model's generation_config.json; without one, the value in brackets)"


def complete_model(incomplete: str) -> list[str]:
    """Names of local models, for shell completion. No network."""
    import os

    from ..runtime.library.listing import model_names

    return [name for name in model_names(os.environ) if name.startswith(incomplete)]


def complete_downloadable(incomplete: str) -> list[str]:
    """Names that pull accepts, for shell completion: those of the catalog, and cached repositories of the hub. No network."""
    import os

    from .. import EffllmError
    from ..runtime.catalog import catalog

    try:
        aliases = [entry.alias for entry in catalog(os.environ) if entry.repo]
    except EffllmError:  # the command itself reports it
        aliases = []
    local = [name for name in complete_model(incomplete) if "/" in name]
    return [name for name in aliases if name.startswith(incomplete)] + local


def complete_session(incomplete: str) -> list[str]:
    """Names of saved sessions, for shell completion."""
    import os

    from .. import EffllmError
    from ..runtime.library.storage import sessions_folder
    from ..runtime.sessions.session_store import SessionStore

    try:
        return [name for name in SessionStore(sessions_folder(os.environ)).names() if name.startswith(incomplete)]
    except EffllmError:  # the command itself reports it
        return []


WHICH_MODEL = "a name from `effllm list -a`, org/repo, a folder, a GGUF file or ollama:NAME"


def model_argument(metavar: str = "MODEL", complete: Callable[[str], list[str]] = complete_model, which: str = WHICH_MODEL) -> Any:
    return typer.Argument(metavar=metavar, help=f"{which}; may end in @revision, :4bit, :FILE or :Q4_K_M", autocompletion=complete,
                          show_default=False)


Model = Annotated[str, model_argument()]
AnyModel = Annotated[str | None, model_argument()]
RemovableModel = Annotated[str, model_argument(which="a name from `effllm list`, org/repo, or a folder that effllm quantized")]
AbsentModel = Annotated[str, model_argument(complete=complete_downloadable, which="a name from `effllm list -a`, or org/repo on the hub")]
Models = Annotated[list[str] | None, model_argument("MODEL ...")]
Threads = Annotated[int | None, flag(COMPUTE, "-t --threads", "N", "CPU threads (all physical cores)")]
Sample = Annotated[str | None, flag(TEXT, "--text", "FILE", "the text to record on, - is standard input (a sample)")]
Json = Annotated[bool, flag(OUTPUT, "--json", "", "print one JSON object")]
Yes = Annotated[bool, flag(OUTPUT, "-y --yes", "", "answer yes to questions")]


@dataclass(frozen=True)
class FlagGroup:
    """Flags that commands share.

    from_settings: fields set by a variable or a settings file. They were not given for this model and command, so where they do not
    apply they are ignored instead of being an error.
    """

    from_settings: frozenset[str] = field(default=frozenset(), kw_only=True)


KV_FORMATS = ("32bit", "16bit", "8bit", "6bit", "5bit", "4bit", "3bit", "2bit", "auto")  # completions of --kv
# Pairs of (field, value) of flags that exclude each other; None is any value.
CONTRADICTIONS = ((("kv", None), ("cache_k", None)), (("kv", None), ("cache_v", None)), (("exact", True), ("kernel", "lut")),
                  (("draft", None), ("spec", "off")), (("draft", None), ("spec", "mtp")), (("device", "cpu"), ("gpu_layers", None)),
                  (("device", "cpu"), ("vram", None)), (("gpu_layers", 0), ("device", "cuda")), (("gpu_layers", 0), ("vram", None)),
                  (("schema", None), ("grammar", None)))


@dataclass(frozen=True)
class EngineFlags(FlagGroup):
    """How a model runs."""

    device: Annotated[Literal["auto", "cpu", "cuda"] | None, flag(COMPUTE, "--device", "auto|cpu|cuda",
                                                                  "where to run the layers (auto)")] = None
    threads: Threads = None
    kernel: Annotated[Literal["auto", "dot", "lut"] | None, flag(COMPUTE, "--kernel", "auto|dot|lut",
                                                                 "for low-bit weights: dot products, table lookup, or whichever measures "
                                                                 "faster (auto)")] = None
    exact: Annotated[bool, flag(COMPUTE, "--exact", "",
                                "multiply by float32 activations: slower, nothing is rounded")] = False
    gpu_layers: Annotated[int | None, flag(COMPUTE, "-ngl --gpu-layers", "N", "put the last N layers on the GPU (as many as fit)")] = None
    strict: Annotated[bool, flag(COMPUTE, "--strict", "",
                                 "make a fallback an error: less context than the model has, weights from the disk or widened, slower "
                                 "kernels, a missing template, an unknown key in the config")] = False
    ctx: Annotated[int | None, flag(MEMORY, "-c --ctx-size --ctx", "N",
                                    "size of the context in tokens; 16k is 16384 (the model's, or what fits of it)"), token_count] = None
    ram: Annotated[str | None, flag(MEMORY, "--ram", "SIZE", "maximum memory to use, such as 6G or 512MiB (what is free)")] = None
    vram: Annotated[str | None, flag(MEMORY, "--vram", "SIZE", "maximum GPU memory to use (what is free)")] = None
    load: Annotated[Literal["ram", "mmap"] | None, flag(MEMORY, "--load", "ram|mmap",
                                                        "read the weights into memory, or map the files (ram)")] = None
    force: Annotated[bool, flag(MEMORY, "--force", "",
                                "allow a context longer than the model was trained for, and a --kv that breaks it")] = False
    kv: Annotated[str | None, flag(CACHE, "--kv", "BITS",
                                   "precision of the cache: 32bit, 16bit, 8bit to 2bit, k8v4, auto, or 4bit+POLICY; 4bit+x lists the "
                                   "policies (16bit)", autocompletion=word_completer(KV_FORMATS))] = None
    cache_k: Annotated[str | None, flag(CACHE, "-ctk --cache-type-k", "TYPE",
                                        "type of the keys, by llama.cpp's name for it (as --kv)")] = None
    cache_v: Annotated[str | None, flag(CACHE, "-ctv --cache-type-v", "TYPE", "type of the values (as --kv)")] = None
    kv_sink: Annotated[int | None, flag(CACHE, "--kv-sink", "N", "how many of the first tokens stay exact (64, or by the profile)")] = None
    kv_window: Annotated[int | None, flag(CACHE, "--kv-window", "N",
                                          "how many of the newest tokens stay exact (128, or by the profile)")] = None
    kv_ram: Annotated[str | None, flag(CACHE, "--kv-ram", "SIZE",
                                       "maximum memory for the cache; the rest goes to the disk (what is left)")] = None
    kv_read: Annotated[Literal["exact", "sparse"] | None, flag(CACHE, "--kv-read", "exact|sparse",
                                                               "read all KV pages on the disk, or only those "
                                                               "that seem to matter (exact)")] = None
    disk: Annotated[str | None, flag(CACHE, "--disk", "SIZE", "maximum disk space for the cache (what is free)")] = None
    spill_dir: Annotated[str | None, flag(CACHE, "--spill-dir", "DIR",
                                          "folder for the part of the cache on the disk (the user's cache folder)")] = None

    def options(self, **more: object) -> EngineOptions:
        """EngineOptions from the given flags; `more`: options that only some commands have."""
        from ..runtime.engine import EngineOptions

        values, from_settings = given_options(self), self.from_settings
        for pair in CONTRADICTIONS:
            conflicting = [name for name, value in pair if name in values and value in (None, values[name])]
            weaker_fields = [name for name in conflicting if name in from_settings]
            if len(conflicting) == 2 and len(weaker_fields) == 1:  # the typed flag applies; two of the same rank are an error
                del values[weaker_fields[0]]
        if "kv" in values and not {"cache_k", "cache_v"}.isdisjoint(values):  # given 16bit looks like the default later
            raise UsageError("--kv and -ctk or -ctv say the same thing", "give one of them")
        if "lora" in values:
            values["lora"] = tuple(values["lora"])
        return EngineOptions(**values, from_settings=from_settings, **{name: value for name, value in more.items() if value is not None})


Lora = Annotated[list[str] | None, flag(COMPUTE, "--lora", "ADAPTER",
                                        "apply a LoRA adapter (folder or GGUF file) without merging it; ADAPTER:0.5 applies half of it; "
                                        "may be repeated")]


@dataclass(frozen=True)
class RunFlags(EngineFlags):
    """How a generative model runs."""

    spec: Annotated[Literal["auto", "off", "lookup", "mtp"] | None, flag(COMPUTE, "--spec", "auto|off|lookup|mtp",
                                                                         "speculative decoding, which changes no text: lookup drafts from "
                                                                         "the text so far, mtp also with the model's own MTP layer, "
                                                                         "auto picks what is fastest (auto)")] = None
    draft: Annotated[str | None, flag(COMPUTE, "--draft", "MODEL",
                                      "draft model for speculative decoding: with the same tokenizer, or trained for this model")] = None
    lora: Lora = None
    predict_neurons: Annotated[bool, flag(COMPUTE, "--predict-neurons", "",
                                          "prefetch the neurons that a predictor expects to be active")] = False


@dataclass(frozen=True)
class BitsFlag(FlagGroup):
    """Quantization on load, for a plan."""

    bits: Annotated[int | None, flag(MEMORY, "--bits", "8|6|5|4|3|2", "quantize the weights while loading (as they are stored)")] = None


@dataclass(frozen=True)
class WeightFlags(BitsFlag):
    """Quantization on load."""

    keep: Annotated[bool, flag(MEMORY, "--keep", "", "keep the weights that --bits quantizes for the next run")] = False


Mmproj = Annotated[str | None, flag(COMPUTE, "-mm --mmproj", "FILE",
                                    "vision or audio projector of a GGUF model (the mmproj*.gguf beside it)")]
Parallel = Annotated[int, flag(MEMORY, "-np --parallel", "N", "answers to generate at once, each with its own context and cache (1)")]
SessionDisk = Annotated[str | None, flag(ANSWER, "--session-disk", "SIZE", "maximum disk space for the caches of all sessions (4G)")]


@dataclass(frozen=True)
class SessionFlags(FlagGroup):
    """Saved sessions."""

    session: Annotated[str | None, flag(ANSWER, "--session", "NAME", "continue this conversation, or start it; it is saved with its cache",
                                        autocompletion=complete_session)] = None
    session_disk: SessionDisk = None


@dataclass(frozen=True)
class ToolFlags(FlagGroup):
    """MCP tools. Not available in settings files: a downloaded folder must not decide which programs are started."""

    mcp: Annotated[str | None, flag(TOOLS, "--mcp", "FILE", "let the model call tools of the MCP servers in this file; asks before each "
                                                            "call")] = None
    yes_tools: Annotated[bool, flag(TOOLS, "--yes-tools", "", "call tools without asking")] = False
    tool_rounds: Annotated[int | None, flag(TOOLS, "--tool-rounds", "N", "maximum rounds of tool calls in one answer (25)")] = None


NO_SEQUENCE_BREAKERS = "none"
ESCAPES = {"\\n": "\n", "\\t": "\t", "\\r": "\r", "\\\\": "\\", '\\"': '"', "\\'": "'"}  # escapes in flags, as in llama.cpp


def dry_breakers(texts: Sequence[str]) -> tuple[str, ...]:
    """Parse the values of --dry-sequence-breaker: a single `none` means no text, `\\n` a line break."""
    import re

    unescaped = (re.sub(r"\\[ntr\\\"']", lambda match: ESCAPES[match.group()], text) for text in texts)
    return () if [*texts] == [NO_SEQUENCE_BREAKERS] else tuple(unescaped)


RANDOM_SEED = -1  # as in llama.cpp


@dataclass(frozen=True)
class SamplingFlags(FlagGroup):
    """Sampling. Defaults come from the model's generation_config.json, then from SamplerSettings."""

    temperature: Annotated[float | None, flag(SAMPLING, "--temp", "T", "temperature; 0 always takes the most likely token (0.8)")] = None
    top_k: Annotated[int | None, flag(SAMPLING, "--top-k", "K", "keep the K most likely tokens; 0 is off (40)")] = None
    top_p: Annotated[float | None, flag(SAMPLING, "--top-p", "P",
                                        "keep the most likely tokens that together have probability P; 1 is off (0.95)")] = None
    min_p: Annotated[float | None, flag(SAMPLING, "--min-p", "P",
                                        "keep tokens at least P times as likely as the most likely one; 0 is off (0.05)")] = None
    typical_p: Annotated[float | None, flag(SAMPLING, "--typical", "P",
                                            "keep the most typical tokens that together have probability P; 1 is off (1.0)")] = None
    repetition_penalty: Annotated[float | None, flag(SAMPLING, "--repeat-penalty", "X",
                                                     "penalty for repeated tokens, a factor; 1 is off (1.0)")] = None
    presence_penalty: Annotated[float | None, flag(SAMPLING, "--presence-penalty", "X",
                                                   "penalty for a repeated token, the same however often; 0 is off (0.0)")] = None
    frequency_penalty: Annotated[float | None, flag(SAMPLING, "--frequency-penalty", "X",
                                                    "penalty for a repeated token, for each time; 0 is off (0.0)")] = None
    penalty_last_n: Annotated[int | None, flag(SAMPLING, "--repeat-last-n", "N",
                                               "how many tokens back these three penalties look; -1 is all (-1)")] = None
    dry_multiplier: Annotated[float | None, flag(SAMPLING, "--dry-multiplier", "X",
                                                 "DRY: penalty for continuing a repeat, larger for longer ones; 0 is off (0.0)")] = None
    dry_base: Annotated[float | None, flag(SAMPLING, "--dry-base", "X",
                                           "DRY: factor by which the penalty grows with each repeated token (1.75)")] = None
    dry_allowed_length: Annotated[int | None, flag(SAMPLING, "--dry-allowed-length", "N",
                                                   "DRY: shortest repeat that counts, in tokens (2)")] = None
    dry_penalty_last_n: Annotated[int | None, flag(SAMPLING, "--dry-penalty-last-n", "N",
                                                   "DRY: how many tokens back it looks; -1 is all, 0 is off (-1)")] = None
    dry_sequence_breakers: Annotated[list[str] | None, flag(SAMPLING, "--dry-sequence-breaker", "TEXT",
                                                            "DRY: text that ends a repeat; may be repeated; none stands for no text (\\n, "
                                                            ':, " and *)')] = None
    xtc_probability: Annotated[float | None, flag(SAMPLING, "--xtc-probability", "P",
                                                  "XTC: how often to drop all likely tokens but the least likely "
                                                  "of them; 0 is off (0.0)")] = None
    xtc_threshold: Annotated[float | None, flag(SAMPLING, "--xtc-threshold", "P",
                                                "XTC: probability from which a token is likely; above 0.5 is off (0.1)")] = None
    top_n_sigma: Annotated[float | None, flag(SAMPLING, "--top-nsigma --top-n-sigma", "X",
                                              "keep tokens whose logit is within X standard deviations of the largest; 0 or less is off "
                                              "(-1.0)")] = None
    mirostat: Annotated[int | None, flag(SAMPLING, "--mirostat", "0|1|2",
                                         "use Mirostat, of this version, instead of all filters; 0 is off (0)")] = None
    mirostat_tau: Annotated[float | None, flag(SAMPLING, "--mirostat-ent --mirostat-tau", "BITS",
                                               "Mirostat: target surprise of a token (5.0)")] = None
    mirostat_eta: Annotated[float | None, flag(SAMPLING, "--mirostat-lr --mirostat-eta", "X", "Mirostat: learning rate (0.1)")] = None
    seed: Annotated[int | None, flag(SAMPLING, "--seed", "N",
                                     "the same seed and flags give the same text (random, as with -1; --stats shows it)")] = None

    def settings(self, folder: Path, warn: Callable[[str], None]) -> SamplerSettings:
        """Settings for the model in `folder`. `warn` is called for each ignored value of its generation_config.json."""
        from ..runtime.sampling.generation_config import read_generation_config

        content, warnings = read_generation_config(folder)
        for warning in warnings:
            warn(warning)
        return self.over(content)

    def over(self, content: Mapping[str, object]) -> SamplerSettings:
        """Settings from the flags given, else from the content of a generation_config.json. Raises UsageError that names the flag."""
        from ..runtime.sampler import SamplerSettings

        try:
            return SamplerSettings.from_generation_config(content, **self.overrides())
        except UsageError as error:
            field, _, rest = error.message.partition(" ")
            flags = {name: flag_name for flag_name, (name, _) in names_and_types(SamplingFlags).items()}
            raise UsageError(f"--{flags[field]} {rest}" if field in flags else error.message, error.hint) from None

    def overrides(self) -> dict[str, object]:
        """Field of SamplerSettings -> value, for the flags given."""
        values = given_options(self)
        if values.get("seed") == RANDOM_SEED:
            del values["seed"]
        if "dry_sequence_breakers" in values:
            values["dry_sequence_breakers"] = dry_breakers(values["dry_sequence_breakers"])
        return values


@dataclass(frozen=True)
class ShowFlags(FlagGroup):
    """What is shown of an answer."""

    stats: Annotated[bool, flag(OUTPUT, "--stats", "", "after the answer, print its speed and memory on stderr")] = False
    markdown: Annotated[bool, flag(OUTPUT, "--markdown", "", "render markdown on a terminal; in a pipe the text stays as it is")] = False


@dataclass(frozen=True)
class AnswerFlags(FlagGroup):
    """System prompt, limits and constraints of answers."""

    system: Annotated[str | None, flag(ANSWER, "-s --system", "TEXT", "the system prompt")] = None
    predict: Annotated[int | None, flag(ANSWER, "-n --predict", "N", "maximum tokens to generate; -1 is no limit (-1)")] = None
    stop: Annotated[list[str] | None, flag(ANSWER, "--stop", "TEXT", "stop before this text; may be repeated")] = None
    schema: Annotated[str | None, flag(ANSWER, "--schema", "FILE|{…}|json",
                                       "answer in JSON that follows a schema: a file, the schema itself, or json for any object")] = None
    grammar: Annotated[str | None, flag(ANSWER, "--grammar", "FILE|GBNF",
                                        "answer in text that follows a grammar: a file (GBNF or "
                                        "Lark), or the grammar itself (GBNF)")] = None
    think: Annotated[Literal["auto", "on", "off"] | None, flag(ANSWER, "--think", "auto|on|off",
                                                               "let the model reason first; its reasoning goes "
                                                               "to stderr, dimmed (auto)")] = None
    reasoning_budget: Annotated[int | None, flag(ANSWER, "--reasoning-budget", "N",
                                                 "maximum tokens of reasoning before the answer begins; -1 is no limit (-1)")] = None
    overflow: Annotated[Literal["error", "shift"] | None, flag(ANSWER, "--overflow", "error|shift",
                                                               "when the context is full, end the answer or drop the middle of the text "
                                                               "(error)")] = None

    @property
    def max_tokens(self) -> int | None:
        return token_limit(self.predict)

    @property
    def max_reasoning_tokens(self) -> int | None:
        return token_limit(self.reasoning_budget, "--reasoning-budget")

    def constraint(self) -> Constraint | None:
        """The constraint on answers, None if there is none. A typed --schema or --grammar takes precedence over one from settings. Raises
        UsageError."""
        if self.schema is None and self.grammar is None:
            return None
        from ..runtime.constraints.constraint import read_constraint_flags

        values = {name: getattr(self, name) for name in ("schema", "grammar")}
        if None not in values.values() and len(weaker_fields := self.from_settings & values.keys()) == 1:
            values[min(weaker_fields)] = None
        return read_constraint_flags(**values)


def require_answer_tokens(tokens: int | None, hint: str) -> None:
    """Raise UsageError for a chat with -n 0: a question without an answer cannot be part of it."""
    if tokens == 0:
        raise UsageError("-n 0 leaves no room for an answer", hint)


def token_limit(tokens: int | None, flag: str = "-n") -> int | None:
    """The limit of a session for the value of `flag`: None for no limit. Raises UsageError for one below -1."""
    if tokens is not None and tokens < -1:
        raise UsageError(f"{flag} {tokens} is out of range", "0 or more, or -1 for no limit")
    return None if tokens in (None, -1) else tokens


def given_options(flags: EngineFlags | SamplingFlags) -> dict[str, object]:
    """The fields given on the command line, by a variable or in a file; 0 counts as given."""
    values = {field.name: getattr(flags, field.name) for field in flags_of(type(flags))}
    return {name: value for name, value in values.items() if value is not None and value is not False}
