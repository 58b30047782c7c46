"""Hints for users of llama.cpp, Ollama, mlx-lm, vLLM and llm: names that mean the same are accepted, others get a hint.

The command line is checked before the library parses it, because the library reads `-seed` as `-s eed`: an unintended system prompt."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .. import EffllmError, UsageError, typed

if TYPE_CHECKING:
    from .options import AnswerFlags
    from .screen import Screen

RUN_EXAMPLE = 'effllm run MODEL "your prompt"'
# Other programs' name of a flag -> our name: accepted silently, since the values are the same.
FLAG_SYNONYMS = {"--n-predict": "--predict", "--n-gpu-layers": "--gpu-layers", "--temperature": "--temp", "-sys": "--system",
                 "--system-prompt": "--system", "--json-schema": "--schema", "--json-schema-file": "--schema", "-jf": "--schema",
                 "--grammar-file": "--grammar", "--reasoning": "--think", "-rea": "--think"}
# Other programs' flag -> our equivalent, which a hint names if the command has it: its values may differ.
EQUIVALENT_FLAGS = {
    "--max-tokens": "-n", "--num-predict": "-n", "--max-new-tokens": "-n", "--num-ctx": "-c", "--n-ctx": "-c",
    "--context-length": "-c", "--max-kv-size": "-c", "--verbose": "--stats", "-v": "--stats", "--format": "--json",
    "--kv-bits": "--kv", "--reverse-prompt": "--stop", "-r": "--stop", "-j": "--schema", "--mmap": "--load", "--num-gpu": "-ngl",
    "--num-thread": "-t", "--q-bits": "--bits", "-q": "--bits", "--quantize": "--bits", "--mlx-path": "-o", "--outfile": "-o",
    "--outtype": "--type", "--model-draft": "--draft", "--draft-model": "--draft", "--alias": "--name",
    "--served-model-name": "--name", "--max-queue": "--queue", "--models-max": "--max-models",
    "--max-num-seqs": "--parallel", "--allowed-origins": "--cors", "--adapter": "--lora", "--adapter-path": "--lora",
    "--reps": "-r", "--num-trials": "-r", "-f": "--text", "--file": "--text", "-tb": "-t", "--threads-batch": "-t",
    "--max-model-len": "-c", "--gpu-memory-utilization": "--vram", "--kv-cache-dtype": "--kv", "--quantization": "--bits",
    "--ignore-chat-template": "--raw", "--sleep-idle-seconds": "--keep-alive",
    **dict.fromkeys(("--prompt-cache", "--prompt-cache-file", "--continue", "-cid", "--cid"), "--session"),
    **dict.fromkeys(("--think-budget", "--thinking-budget", "--thinking-token-budget"), "--reasoning-budget"),
}
BITS_FLAG = "--bits"
BIT_WIDTHS = ("8", "6", "5", "4", "3", "2")
ALWAYS_ON_HINT = "leave it out: it is always on, or the plan decides"
# A flag that names the model -> the hint; `{}` is the command.
MODEL_FLAG_HINTS = {
    **dict.fromkeys(("-m", "--model", "--hf-path"), "the model comes right after the command, without a flag: {} MODEL"),
    **dict.fromkeys(("-hf", "-hfr", "--hf-repo"), "a repository is named like any model: {} org/repo:Q4_K_M"),
    **dict.fromkeys(("-hff", "--hf-file"), "a file of a repository: {} org/repo:FILE.gguf"),
}
TOKEN_HINT = "a token of the hub is taken from HF_TOKEN, or from hf auth login"
# Other programs' flag -> the hint for run, chat and serve.
FLAG_HINTS = {
    **dict.fromkeys(("-p", "--prompt"), f"the prompt comes after the model, without a flag: {RUN_EXAMPLE}"),
    **dict.fromkeys(("-cnv", "--conversation", "-i", "--interactive", "-if"), "a conversation: effllm chat MODEL"),
    **dict.fromkeys(("-no-cnv", "--no-conversation", "-st", "--single-turn"), f"a prompt on the line is answered once: {RUN_EXAMPLE}"),
    **dict.fromkeys(("-fa", "--flash-attn", "-b", "--batch-size", "-ub", "--ubatch-size", "--no-warmup", "--keepalive", "--color",
                     "--no-display-prompt", "-no-display-prompt", "-kvu", "--kv-unified", "--swa-full", "-fit", "--fit", "--repack",
                     "--no-repack", "--perf", "--no-perf", "-dt", "--defrag-thold", "-dio", "--direct-io", "--no-op-offload",
                     "-nkvo", "--no-kv-offload", "--cache-reuse", "--enforce-eager", "--enable-prefix-caching"), ALWAYS_ON_HINT),
    **dict.fromkeys(("-sm", "--split-mode", "-ts", "--tensor-split", "-mg", "--main-gpu", "-dev", "--tensor-parallel-size"),
                    "leave it out: the plan places layers; -ngl and --vram limit what a GPU gets"),
    **dict.fromkeys(("--rope-scaling", "--rope-scale", "--rope-freq-base", "--rope-freq-scale", "--yarn-orig-ctx", "--yarn-ext-factor"),
                    "leave it out: position scaling comes from the model's files; --force allows a longer context than theirs"),
    **dict.fromkeys(("--numa", "--prio", "--poll", "-C", "--cpu-mask", "-Cr", "--cpu-range", "--cpu-strict"),
                    "leave it out: -t sets how many cores, and taskset or numactl before the command sets which"),
    **dict.fromkeys(("-e", "--escape", "--no-escape"), "leave it out: a prompt is taken as it is typed; in bash $'a\\nb' is two lines"),
    **dict.fromkeys(("--draft-max", "--draft-n", "--draft-min", "--draft-p-min", "--spec-draft-n-max", "--num-draft-tokens"),
                    "leave it out: the number of drafted tokens adapts to how many are accepted"),
    "--context-shift": "use --overflow shift",
    "--no-context-shift": "leave it out: a full context ends the answer, and --overflow shift drops the middle instead",
    **dict.fromkeys(("-o", "--option"), "a setting is a flag of its own, such as --temp 0.5"),
    **dict.fromkeys(("--no-stream", "--nowordwrap"), "leave it out: in a pipe or a file the answer is not formatted"),
    **dict.fromkeys(("-a", "--attachment"), "an image goes with a prompt: --image FILE; a text file: -f FILE"),
    "--log-file": "2> FILE keeps what goes to stderr",
    "--trust-remote-code": "leave it out: no code that comes with a model is run",
    **dict.fromkeys(("--n-cpu-moe", "-ncmoe", "--cpu-moe", "-cmoe", "-ot", "--override-tensor"),
                    "leave it out: the plan places layers and experts; --ram and --vram limit it"),
    **dict.fromkeys(("--quiet", "--hidethinking", "--log-disable"),
                    "stdout has only the answer; 2>/dev/null hides the rest, including reasoning"),
    **dict.fromkeys(("--chat-template", "--chat-template-file", "--jinja"), "leave it out: the model has its own; --raw uses none"),
    "--lora-scaled": "the scale goes after the adapter's name: --lora ADAPTER:0.5",
    "--lora-init-without-apply": "to load an adapter that requests then choose: --lora ADAPTER:0",
    **dict.fromkeys(("--lora-modules", "--enable-lora"), "use --lora ADAPTER:0; requests choose it by the name of its folder"),
    "--image": "an image goes with a prompt: effllm run MODEL --image FILE \"...\", and in a chat /image FILE",
    "--no-mmproj": "leave it out: the vision tower is loaded with the first image",
    **dict.fromkeys(("-mmu", "--mmproj-url"), "effllm pull fetches it with the model; for a local file: --mmproj FILE"),
    "--audio": "an audio clip goes with a prompt: effllm run MODEL --audio FILE \"...\", and in a chat /audio FILE",
    **dict.fromkeys(("-np", "--parallel"), "several answers at once: effllm serve MODEL --parallel N"),
    **dict.fromkeys(("-cb", "--cont-batching"), "leave it out: effllm serve MODEL --parallel N always batches continuously"),
    "--format": "an answer in JSON: --schema json; the answer with its statistics as JSON: --json",
    **dict.fromkeys(("--samplers", "--sampling-seq", "--sampler-seq"), "leave it out: the order is always the same (docs/sampling.md)"),
    **dict.fromkeys(("-l", "--logit-bias"), "requests to effllm serve take it, as logit_bias"),
    "-md": "use --draft: effllm run --help",
    **dict.fromkeys(("--mlock", "--no-mmap"), "leave it out: weights are read into memory (--load mmap maps the files)"),
}
# Other programs' flag -> the hint for serve.
SERVE_FLAG_HINTS = {
    **dict.fromkeys(("--slots", "--props", "--metrics"), "leave it out: GET /slots, /props and /metrics are always there"),
    **dict.fromkeys(("--embedding", "--embeddings", "--rerank", "--reranking", "--pooling"),
                    "leave it out: embedding and reranking models answer at /v1/embeddings or /v1/rerank"),
    **dict.fromkeys(("-v", "--verbose", "-lv", "--verbosity"), "leave it out: each request is logged; --quiet turns that off"),
    "--log-disable": "use --quiet: requests are not logged",
    **dict.fromkeys(("--ssl-key-file", "--ssl-cert-file"), "across a network, put a proxy with TLS in front of it"),
    "--models-dir": "name the files, effllm serve A.gguf B.gguf; without a MODEL, all that effllm list shows are served",
    **dict.fromkeys(("-cram", "--cache-ram"), "use --session-disk: KV caches of evicted prompts are kept on the disk"),
    "--path": "no files are served; --no-webui leaves out the chat page",
    **dict.fromkeys(("--reasoning-format", "--reasoning-parser"), "leave it out: reasoning comes as reasoning_content beside content"),
    **dict.fromkeys(("--tool-call-parser", "--enable-auto-tool-choice"), "leave it out: the tool call format is detected from the model"),
    "-a": "use --name",
}
# Other programs' flag -> the hint for show.
SHOW_FLAG_HINTS = {"--license": "use effllm show MODEL: it shows the licence", **dict.fromkeys(
    ("--modelfile", "--parameters", "--system"), "the settings of a model, and where each comes from: effllm config show MODEL --origin")}
FLAGS_BEFORE_COMMAND = ("-p", "--prompt", "-i", "--interactive", "-cnv")  # flags with a hint even before any command
# Other programs' command -> our equivalent.
EQUIVALENT_COMMANDS = {
    "models": "list --all", "find": "search", "tags": "list", "download": "pull", "install": "pull",
    "get": "pull", "fetch": "pull", "add": "pull", "remove": "rm", "delete": "rm", "uninstall": "rm", "info": "show",
    "inspect": "show", "clone": "pull", "manage": "list", "env": "doctor",
    "generate": "run", "ask": "run", "prompt": "run", "cli": "run",
    "server": "serve", "start": "serve", "convert": "quantize", "benchmark": "bench",
    **{measure: f"eval {measure}" for measure in ("ppl", "kld", "recall", "kv-profile")}, "perplexity": "eval ppl",
    **dict.fromkeys(("embedding", "embeddings", "vectorize"), "embed"),
    **dict.fromkeys(("transcription", "asr", "stt", "listen"), "transcribe"),
    "version": "--version", "sessions": "session list", "settings": "config show",
}
# Other programs' command -> the hint, where we have no equivalent.
COMMAND_HINTS = {
    **dict.fromkeys(("ps", "stop", "unload", "status"), "nothing stays in memory after a command ends; what a server has "
                    "loaded: curl http://127.0.0.1:8080/api/ps"),
    **dict.fromkeys(("load", "daemon"), "each command loads its model by itself, and effllm serve keeps models loaded"),
    **dict.fromkeys(("cp", "tag", "mv", "rename"), "to give a model another name: effllm alias NEW MODEL"),
    "import": "a file is used in place: effllm run ./model.gguf; a short name for it: effllm alias NAME FILE",
    **dict.fromkeys(("log", "logs"), "no log is written; effllm serve prints a line for each request, and effllm session list "
                    "shows saved conversations"),
    "launch": "effllm serve, and then the program with the server's address (docs/clients.md)",
    "imatrix": "quantize takes the text itself: effllm quantize MODEL -o DIR --bits 4 --method gptq --calib FILE",
    **dict.fromkeys(("completion", "completions"), "effllm --show-completion prints the completion script for this shell, effllm "
                    "--install-completion installs it"),
    **dict.fromkeys(("login", "signin", "keys"), "hf auth login, or a token in HF_TOKEN"),
    **dict.fromkeys(("merge", "fuse"), "to merge an adapter into its model: effllm export MODEL -o DIR --lora ADAPTER"),
    **dict.fromkeys(("lora", "train", "finetune"), "effllm does not train; an adapter trained elsewhere is applied to its "
                    "model: effllm run MODEL --lora ADAPTER"),
    **dict.fromkeys(("tokenize", "detokenize"), "effllm serve MODEL does this: POST /tokenize or /detokenize"),
    "create": "from a Modelfile: effllm alias NAME --modelfile FILE; with fewer bits: effllm quantize MODEL -o DIR --bits 4",
    **dict.fromkeys(("push", "upload"), "effllm uploads nothing; use hf upload ORG/REPO DIR"),
}

SETTINGS_HINT = "settings are lines of effllm.toml, such as temp = 0.5: effllm config show --help"
RESUME_HINT = "to continue a saved conversation: effllm chat MODEL --session NAME"
# Command group -> unknown subcommand -> the hint; "" stands for any other word.
SUBCOMMAND_HINTS = {
    "config": {"": SETTINGS_HINT,
               **dict.fromkeys(("get", "list", "ls", "print", "view"), "effllm config show --origin shows every setting")},
    "session": {**dict.fromkeys(("show", "load", "open", "resume", "continue", "start", "new"), RESUME_HINT),
                **dict.fromkeys(("ls", "remove", "delete"), "effllm session list, effllm session rm NAME")},
}
# Command -> its own flag hints.
COMMAND_FLAG_HINTS = {"serve": SERVE_FLAG_HINTS, "show": SHOW_FLAG_HINTS}
# Subcommands that remove an alias in other programs; here they would become the name of a new one.
REMOVAL_WORDS = ("rm", "remove", "delete", "unset", "unalias")


def translate_commands(argv: Sequence[str]) -> list[str]:
    """`effllm help run` is `effllm run --help`, and `effllm ls` is `effllm list`, as in Ollama."""
    if argv[:1] == ["ls"]:
        return ["list", *argv[1:]]
    return [*argv[1:], "--help"] if argv[:1] == ["help"] else [*argv]


def command_hint(word: str, variables: Mapping[str, str]) -> str:
    """The hint for an unknown command; empty if there is none."""
    if word in EQUIVALENT_COMMANDS:
        return f"use effllm {EQUIVALENT_COMMANDS[word]}"
    return COMMAND_HINTS.get(word, "") or (f'effllm run {word} "your prompt", or effllm chat {word}' if is_model(word, variables) else "")


def subcommand_hint(group: str, word: str) -> str:
    """`command_hint` for a command of a group: `effllm config set`."""
    hints = SUBCOMMAND_HINTS.get(group, {})
    return hints.get(word, hints.get("", ""))


def is_model(word: str, variables: Mapping[str, str]) -> bool:
    """Whether a word names a model that is here, or one of the catalog."""
    from ..runtime.catalog import Absent, resolve

    try:
        return bool(resolve(word, variables).folder)
    except Absent:
        return True
    except EffllmError:
        return False


def flag_hint(command: Any, name: str) -> str:
    """The hint for an unknown flag; empty if there is none."""
    if name in ("-v", "-V") and "--version" in flags_of(command):
        return "use effllm --version"
    if getattr(command, "commands", None) and (hint := misplaced_flag_hint(name)):
        return hint
    if any({name, FLAG_SYNONYMS.get(name)} & {*flags_of(subcommand)} for subcommand in getattr(command, "commands", {}).values()):
        return f"flags go after the command: effllm COMMAND {name}"
    if name in MODEL_FLAG_HINTS and any(parameter.name in ("model", "models") for parameter in command.params):
        return MODEL_FLAG_HINTS[name].format(command_path(command)) + (' "your prompt"' if command.name == "run" else "")
    hints = {**(FLAG_HINTS if command.name in ("run", "chat", "serve") else {}), **COMMAND_FLAG_HINTS.get(command.name, {})}
    if name in hints:
        return hints[name]
    equivalent = EQUIVALENT_FLAGS.get(name)
    if equivalent is not None and equivalent in flags_of(command):
        return f"use {equivalent}: {command_path(command)} --help"
    return TOKEN_HINT if name in ("--token", "--hf-token", "-hft") else ""


def misplaced_flag_hint(name: str) -> str:
    """The hint for another program's flag before any command; empty if there is none."""
    if name in MODEL_FLAG_HINTS:
        return MODEL_FLAG_HINTS[name].format("effllm run") + ' "your prompt"'
    return FLAG_HINTS[name] if name in FLAGS_BEFORE_COMMAND else ""


def intended_variable(name: str, preferred: Collection[str] = ()) -> str:
    """The variable meant by a flag's short name (`ctx`, `N`), by another program's name (`num_ctx`), or by a misspelling; if several flags
    share the name, the one among `preferred`. Empty if none is close."""
    from difflib import get_close_matches

    from .env_variables import SECOND, VARIABLES

    dashed = name.lower().replace("_", "-")
    flag = FLAG_SYNONYMS.get(f"--{dashed}") or FLAG_SYNONYMS.get(f"-{dashed}") or EQUIVALENT_FLAGS.get(f"--{dashed}") or dashed
    short_name = flag.lstrip("-").upper().replace("-", "_")
    candidates = [variable for short, variable in SECOND if short == short_name]
    # Compared without the common prefix. The closest match of a name is itself.
    if not candidates:
        matches = get_close_matches(short_name, [variable.removeprefix("EFFLLM_") for variable in VARIABLES], 1)
        candidates = [f"EFFLLM_{match}" for match in matches]
    return next((variable for variable in candidates if variable in preferred), candidates[0] if candidates else "")


def command_path(command: Any) -> str:
    """A command as typed, with its group."""
    return f"effllm {EQUIVALENT_COMMANDS.get(command.name, command.name)}"


def flags_of(command: Any) -> dict[str, bool]:
    """Flag name -> whether a value follows it."""
    return {name: not parameter.is_flag for parameter in command.params if parameter.param_type_name == "option"
            for name in (*parameter.opts, *parameter.secondary_opts)}


def translate_flags(command: Any, line: Sequence[str]) -> list[str]:
    """The arguments of a command with other programs' flag names replaced by ours. Raises UsageError for a single-dash word that only looks
    like a short flag with its value."""
    flags, words, is_value = flags_of(command), [], False
    for index, word in enumerate(line):
        if word == "--":
            return [*words, *line[index:]]
        if is_value and words[-1] == BITS_FLAG:
            check_bits(command, word)
        elif is_value and words[-1] in ("-ngl", "--gpu-layers") and word in ("auto", "all"):
            raise UsageError(f"{words[-1]} takes a number of layers, not {word!r}", "leave it out: the plan puts as many on a GPU as fit")
        elif not is_value and word.startswith("-"):
            word = translate_flag(command, flags, word)
            name, equals, value = word.partition("=")
            if equals and name == BITS_FLAG and name in flags:
                check_bits(command, value)
        is_value = not is_value and flags.get(word, False)
        words.append(word)
    return words


def check_bits(command: Any, text: str) -> None:
    """Raises UsageError if --bits is not a number (a format belongs elsewhere), or not a supported number of bits."""
    if text in ("16", "32") and command.name != "quantize":
        raise UsageError(f"{BITS_FLAG} is 8, 6, 5, 4, 3 or 2, not {text}", f"leave out {BITS_FLAG}: the weights stay as they are stored")
    if (number := text.lower().removesuffix("bit").removesuffix("-")) != text and number in BIT_WIDTHS:
        raise UsageError(f"{BITS_FLAG} is 8, 6, 5, 4, 3 or 2, not {text!r}", f"{BITS_FLAG} {number}")
    if text.removeprefix("-").isdigit():
        require_bits(text)
    else:
        spec_command = f"{command_path(command)} MODEL -o DIR --spec SPEC" if "--spec" in flags_of(command) and command.name == "quantize" \
            else f"{command_path(command)} MODEL:ternary"
        raise UsageError(f"{BITS_FLAG} is 8, 6, 5, 4, 3 or 2, not {text!r}", f"ternary and other formats: {spec_command}")


def require_bits(bits: str) -> None:
    """Raises UsageError unless weights can have so many bits."""
    if bits.lstrip("0") not in BIT_WIDTHS:
        raise UsageError(f"{BITS_FLAG} is 8, 6, 5, 4, 3 or 2, not {bits}", f"{BITS_FLAG} 4 is usual, {BITS_FLAG} 8 is almost without loss")


def translate_flag(command: Any, flags: Mapping[str, bool], word: str) -> str:
    """A word that begins with a dash, with our name of its flag; unchanged if there is none. Raises UsageError for a word that the parser
    would misread as a short flag with its value."""
    name, equals, value = word.partition("=")
    if name in flags:
        return word
    if len(name.split()) > 1 and word[:2] not in flags and command.name == "run":
        raise UsageError(f"no such option: {word}", f"put -- before a prompt that begins with a dash: effllm run MODEL -- {typed(word)}")
    if name.startswith("--"):
        dashed = name.replace("_", "-")
        synonym = FLAG_SYNONYMS.get(dashed, dashed)
        return f"{synonym}{equals}{value}" if synonym in flags else word
    if FLAG_SYNONYMS.get(name) in flags:
        return FLAG_SYNONYMS[name] + equals + value
    dashed = f"-{name}".replace("_", "-")
    long_flag = FLAG_SYNONYMS.get(dashed, dashed)
    if len(name) > 2 and (name in MODEL_FLAG_HINTS or name in FLAG_HINTS or name in EQUIVALENT_FLAGS):
        raise UsageError(f"no such option: {name}", flag_hint(command, name) or f"{command_path(command)} --help")
    if len(name) > 2 and long_flag in flags:
        raise UsageError(f"no such option: {name}", f"with two dashes: {long_flag}")
    return word


def note_seed_flag(answer: AnswerFlags, screen: Screen) -> None:
    """Note that -s is the seed in other programs."""
    if answer.system is not None and "system" not in answer.from_settings and answer.system.strip().isdigit():
        screen.note(f"-s is the system prompt, now {answer.system.strip()!r}: the seed is --seed {answer.system.strip()}")
