"""The documentation against the program: every command line in it is valid, cheap ones are run, samples have the lines printed now, and
flags, messages, keys and exit codes have the names given there."""

import ast
import io
import json
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import typer
from hub_user import HubUser
from library_trees import OllamaTree
from test_forecast import KNOWN

import effllm
from effllm.cli.app import build
from effllm.cli.doctor import show_roofs
from effllm.cli.environment import Environment
from effllm.cli.errors import INTERRUPTED
from effllm.cli.screen import Screen
from effllm.runtime.conversion import compressed_tensors
from effllm.runtime.families import COMPOSITE, FAMILIES, MODEL_TYPE_ALIASES
from effllm.runtime.gguf import config_export
from effllm.runtime.gguf.file_architecture import ARCHITECTURE_BY_FAMILY
from effllm.runtime.kv import kv_profile_run
from effllm.runtime.kv.kv_profile import Profile
from effllm.runtime.planning import roofs

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DOCUMENTS = [README, *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in ("ARCHITECTURE.md", "commands.md"))]
ARCHITECTURE = [ROOT / "docs" / "ARCHITECTURE.md", *sorted((ROOT / "docs" / "architecture").glob("*.md"))]
FABLE = ROOT / "models" / "fable"
STORY = "Once upon a time there was a fox who wanted to be king, and a king who wanted to be a fox. " * 24


@cache
def application() -> typer.core.TyperGroup:
    return typer.main.get_command(build())


def command_lines(path: Path) -> Iterator[list[str]]:
    """The words of every command line of effllm in a block, without comments and redirections."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if found := re.match(r"    (?:\$ )?effllm (.+)", line):
            text = re.sub(r"(?:\s+#.*|\s+>\s*\S+\s*)+$", "", found[1])
            yield from (shlex.split(each) for each in text.split(" · "))


def taken(words: list[str]) -> dict[str, object]:
    """Reads a command line as the program does, and runs nothing: what was given. Raises what the program would complain of."""
    environment = Environment(None, None, None, {})
    environment.settings = {}
    command, context = application(), typer.Context(application(), info_name="effllm", obj=environment)
    while isinstance(command, typer.core.TyperGroup):
        name, command, words = command.resolve_command(context, words)
        context = typer.Context(command, parent=context, info_name=name)
    return command.make_context(context.info_name, words, parent=context.parent).params


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_line_is_one_that_the_program_takes(path: Path) -> None:
    wrong = []
    for words in command_lines(path):
        try:
            taken(words)
        except typer.TyperException as error:
            wrong.append(f"effllm {shlex.join(words)}: {error.format_message()}")
    assert not wrong, "\n".join(wrong)


def test_a_line_that_the_program_does_not_take_is_found() -> None:
    for words in (["plan"], ["plan", "fable", "--rma", "6G"], ["eval", "pls", "fable"], ["run", "fable", "hi", "-n", "many"]):
        with pytest.raises(typer.TyperException):
            taken(words)
    assert sum(len([*command_lines(path)]) for path in DOCUMENTS) > 60


def models_listed() -> list[list[str]]:
    """The rows of the table of models: a family as people call it, what is published, `model_type`s, GGUF architectures, remarks."""
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8").partition("\n## Supported models\n\n")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines()[2:]]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


SECOND = {  # architectures of other models of the family
    "granitemoehybrid": "granitehybrid", "nemotron_h": "nemotron_h_moe", "llama": "paddleocr", "hunyuan_v1_dense": "hunyuan_vl",
}


def test_the_table_of_models_has_every_family() -> None:
    rows = models_listed()
    named = [kind for row in rows for kind in quoted(row[2])]
    assert {*named} == {*FAMILIES, *COMPOSITE, *MODEL_TYPE_ALIASES}, (
        "the third column of the table in docs/models.md, against runtime/families/")
    assert all(named.count(name) == 1 for name in FAMILIES)
    for _, _, kinds, files, _ in rows:
        families = {*quoted(kinds)} & {*FAMILIES}
        own = {ARCHITECTURE_BY_FAMILY[name] for name in families if name in ARCHITECTURE_BY_FAMILY}
        own |= {SECOND[name] for name in families if name in SECOND}
        assert families and {*quoted(files)} == own, kinds
        meant = {MODEL_TYPE_ALIASES.get(each, each) for kind in quoted(kinds) for each in COMPOSITE.get(kind, (kind,))[:1]}
        assert meant <= {*FAMILIES} and meant & families, kinds


def test_the_readme_names_models_of_the_table() -> None:
    """How many there are at least, and each by its first word."""
    (line,) = [line for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("| models |")]
    count, named = re.search(r"more than (\d+) .*: (.+);", line).groups()
    rows = models_listed()
    assert int(count) < len(rows) < int(count) + 20
    begun = {re.match(r"[\w.-]+\w", row[0])[0] for row in rows}
    named = [re.match(r"(?:older ones down to )?([\w.-]+\w)", name)[1] for name in re.split(r", | and (?=[A-Z][a-z])", named)]
    assert len(named) > 25 and {*named} <= begun, {*named} - begun


def test_the_readme_counts_the_families_with_audio_input() -> None:
    count = re.search(r"audio beyond (\w+) families", README.read_text(encoding="utf-8"))[1]
    table = (ROOT / "docs" / "multimodal.md").read_text(encoding="utf-8").partition("\n## Audio\n")[2].partition("| takes |")[2]
    rows = [line for line in table.partition("\n\n")[0].splitlines()[2:] if line.startswith("| ")]
    assert ("seven", "eight", "nine", "ten", "eleven", "twelve").index(count) + 7 == len(rows)


@pytest.mark.parametrize(("format_", "not_written"), [("GGUF", config_export.UNSUPPORTED_REASONS),
                                                      ("compressed-tensors", compressed_tensors.NOT_WRITTEN)])
def test_the_models_that_are_not_exported_are_named(format_: str, not_written: dict[str, str]) -> None:
    """By how the names of their rows begin."""
    (said,) = re.findall(rf"^\| {format_} \| ([^;]+);", (ROOT / "docs" / "models.md").read_text(encoding="utf-8"), re.M)
    rows = {row[0]: {*quoted(row[2])} & {*FAMILIES} for row in models_listed()}
    named = set()
    for name in said.split(", "):
        begun = [row for row in rows if row.partition(",")[0] == name] or [row for row in rows if re.match(rf"{re.escape(name)}\b", row)]
        assert len(begun) == 1, (name, begun)
        assert rows[begun[0]] & {*not_written}, f"{name} is written"
        named |= rows[begun[0]]
    missing = {*not_written} - named
    assert not missing, f"families that are not written as {format_}, and not named in the row {format_} of docs/models.md: {missing}"


def flags(command: object) -> set[str]:
    """Every flag of a command and of those beneath it."""
    own = {name for parameter in command.params for name in parameter.opts}
    return own.union(*map(flags, getattr(command, "commands", {}).values()))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_flag_and_command_that_is_named_exists(path: Path) -> None:
    known, text = flags(application()) | {"-h", "--help"}, path.read_text(encoding="utf-8")
    spans = [span for span in re.findall(r"`([^`\n]+)`", text) if not re.match(r"(?:pip|make|lm_eval|hf|git) |[\w/]+\.py", span)]
    for span in spans:
        for flag in re.findall(r"(?<![\w:/.-])--?[a-zA-Z][\w-]*", span):
            assert flag in known, f"{path.name}: `{span}` names {flag}, which no command has"
        words = span.split()
        if words[0] == "effllm" and not words[1].startswith("-") and words[1] != "COMMAND":
            command = application().commands[words[1]]
            assert not isinstance(command, typer.core.TyperGroup) or words[2] in command.commands, span


@pytest.mark.parametrize("path", [*DOCUMENTS, *ARCHITECTURE], ids=lambda path: path.name)
def test_every_link_leads_to_a_file_and_its_heading(path: Path) -> None:
    for link in re.findall(r"\]\(([^):]+)\)", path.read_text(encoding="utf-8")):
        name, _, heading = link.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), link
        titles = [re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-")
                  for line in target.read_text(encoding="utf-8").splitlines() if line.startswith("#")] if heading else []
        assert not heading or heading in titles, link


@pytest.mark.parametrize("path", [*DOCUMENTS, *ARCHITECTURE, ROOT / "CHANGELOG.md"], ids=lambda path: path.name)
def test_every_file_that_is_named_is_there(path: Path) -> None:
    folders = "benchmarks|cli|docs|kernels|models|offload|quant|runtime|tests|tools"
    for name in re.findall(rf"(?<![\w./-])(?:{folders})/[\w./-]+\.(?:py|md|yaml|svg|txt)", path.read_text(encoding="utf-8")):
        assert (ROOT / name).is_file(), name


def defined(path: Path) -> set[str]:
    """The names that a module gives to what is its own: functions, classes and values, not what it imports."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return found


def test_every_name_of_a_module_that_the_architecture_names_is_defined_there() -> None:
    """`module.name`, where one of ours is called so, and a `TABLE` that is said to stand in a file; a dotted key that the module reads,
    of a GGUF file, is no name."""
    text = "".join(path.read_text(encoding="utf-8") for path in ARCHITECTURE)
    modules: dict[str, list[Path]] = {}
    for path in (path for folder in ("cli", "kernels", "offload", "quant", "runtime") for path in (ROOT / folder).rglob("*.py")):
        modules.setdefault(path.stem, []).append(path)
    spans = [(module, name) for module, name in re.findall(r"`(\w+)\.(\w+)(?:\(\))?`", text)
             if module in modules and name not in ("py", "json")]
    wrong = [f"{module}.{name}" for module, name in spans
             if not any(name in defined(path) or f'"{module}.{name}"' in path.read_text(encoding="utf-8") for path in modules[module])]
    placed = re.findall(r"`([A-Z_]+)` (?:of|in) `([\w/]+\.py)`", text)
    placed += [(name, path) for path, name in re.findall(r"`([\w/]+\.py)`, an entry in `([A-Z_]+)`", text)]
    wrong += [f"{name} of {path}" for name, path in placed if name not in defined(ROOT / path)]
    assert len(spans) > 10 and len(placed) > 1 and not wrong, wrong


def test_every_name_that_the_architecture_quotes_is_one_of_the_sources() -> None:
    """Names with capitals, underscores or parentheses, by each of their parts, and bare names of files: what was renamed or removed shows
    here. Words without these may be instructions of processors or other people's, which no source of ours has to say."""
    files = [*ROOT.glob("*.py"), *(path for folder in ("cli", "kernels", "offload", "quant", "runtime", "tests", "tools", "benchmarks")
                                   for path in (ROOT / folder).rglob("*.py"))]
    known = {word for path in files if path != Path(__file__) for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    text = "".join(path.read_text(encoding="utf-8") for path in ARCHITECTURE)
    spans = {span for span in re.findall(r"`([^`\n]+)`", text) if re.fullmatch(r"[\w.]+(?:\(.*\))?", span)}
    named = {span for span in spans if span.endswith(".py")}
    missing = named - {path.name for path in files}
    ours = {span.partition("(")[0] for span in spans - named if re.search(r"[A-Z_(]", span)}
    missing |= {span for span in ours if not {*filter(None, span.split("."))} <= known}
    assert len(named) > 10 and len(ours) > 100 and not missing, sorted(missing)


def test_the_family_that_is_shown_is_the_file() -> None:
    text = (ROOT / "docs" / "architecture" / "families.md").read_text(encoding="utf-8")
    path, block = re.search(r"\(`(runtime/families/\w+\.py)`\):\n\n((?:    .*\n|\n)+)", text).groups()
    shown = [line.removeprefix("    ") for line in block.splitlines() if line]
    file = [line for line in (ROOT / path).read_text(encoding="utf-8").splitlines() if line]
    assert len(shown) > 5 and file[-len(shown) :] == shown


def test_exit_codes_are_those_of_the_errors() -> None:
    said = {int(code) for code in re.findall(r"^\| (\d+) \|", (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"), re.M)}
    errors = [value for value in vars(effllm).values() if isinstance(value, type) and issubclass(value, effllm.EffllmError)]
    assert len(errors) > 5 and said == {error.exit_code for error in errors} | {INTERRUPTED}


def test_messages_that_are_quoted_are_messages() -> None:
    """What a user looks a message up by: it stands in the sources as it is quoted, with an ellipsis for what varies."""
    quoted = re.findall(r'\*\*(?:.*?)"([^"]+)"', (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"))
    files = [path for folder in ("cli", "runtime", "offload") for path in (ROOT / folder).rglob("*.py")]
    sources = "\n".join(path.read_text(encoding="utf-8") for path in files)
    assert len(quoted) > 6
    for message in quoted:
        for part in re.split(r"…|\.\.\.", message):
            assert part.strip() in sources, f"no message says {part.strip()!r}"


# -- what is printed ----------------------------------------------------------------------------------------------------------------


def sample(command: str) -> list[str]:
    """What the one document that has it shows below a command."""
    (lines,) = [lines for path in DOCUMENTS if f"    $ {command}" in (lines := path.read_text(encoding="utf-8").splitlines())]
    shown = []
    for line in lines[lines.index(f"    $ {command}") + 1 :]:
        if line and not line.startswith("    ") or line.startswith("    $ "):
            break
        shown.append(line.removeprefix("    "))
    return [line for line in shown if line]


def shape(line: str) -> str:
    """A line without what differs between machines and hours: figures, sizes, commits, bars, folders, and what a processor has."""
    for pattern, sign in ((r"float tiles, amx|bf16 pairs, avx512", "register tiles"), (r"\b[0-9a-f]{12,40}\b", "COMMIT"),
                          (r"(?<!\w)/[\w/.-]*\w", "FOLDER"), (r"[█▓▒·]{3,}", "BAR"),
                          (r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", "N"), (r"\bN (?:[KMGT]i)?B\b", "SIZE"), (r"\s+", " ")):
        line = re.sub(pattern, sign, line)
    return line.strip()


def shapes(lines: list[str]) -> list[str]:
    return [shape(line) for line in lines]


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, on a machine that was measured."""
    monkeypatch.setattr(roofs, "known", lambda asked: KNOWN)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "story.txt").write_text(STORY)
    (tmp_path / "my-model").symlink_to(FABLE)
    return tmp_path


def test_the_samples_have_the_lines_that_are_printed_now(at_home: Path, user, hub) -> None:
    hub.add("org/model", FABLE)
    command = "effllm run fable \"Tell me a story about the fox and the king.\" --seed 4 -n 90 --stats"
    ran, said = user.run(*shlex.split(command)[1:]), sample(command)
    begun = next(index for index, line in enumerate(said) if line.startswith("stopped after"))
    *figures, foreseen = shapes([line for line in ran.err.splitlines() if not line.startswith(("compiling kernels", "speculation: "))])
    assert figures == shapes(said[begun:-1]) and foreseen.startswith(shape(said[-1].partition(":")[0]))
    assert shapes(user.run("plan", "fable").out.splitlines()) == shapes(sample("effllm plan fable"))
    pulled = user.run("pull", "org/model", "--dry-run").err.splitlines()
    assert shapes(pulled) == shapes(sample("effllm pull org/model --dry-run"))


def test_what_doctor_shows_is_part_of_what_it_says() -> None:
    environment = Environment(io.StringIO(), io.StringIO(), io.StringIO(), {})
    show_roofs(Screen(environment), replace(KNOWN, machine=replace(KNOWN.machine, memory_alone=12e9)))
    printed = set(shapes(environment.stdout.getvalue().splitlines()))
    block = re.search(r"\n\n((?:    .+\n)+)\nSo formats", (ROOT / "docs" / "speed.md").read_text(encoding="utf-8"))[1]
    assert len(block.splitlines()) > 6 and set(shapes(block.splitlines())) <= printed, printed


@pytest.mark.slow
def test_the_sample_of_quantize_and_what_is_cheap_to_type(at_home: Path, user, hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command lines of all documents that take no time on the packaged model, in their order."""
    hub.add("Qwen/Qwen3-0.6B", FABLE)
    monkeypatch.setattr(kv_profile_run, "record_profile", lambda *_, **__: iter([object.__new__(Profile)]))  # a minute
    monkeypatch.delenv("EFFLLM_NO_KV_PROFILE")
    monkeypatch.setenv("EFFLLM_PREDICT", "3")  # flags look for their variables there
    made = user.run("quantize", "fable", "-o", "fable-4bit", "--bits", "4")
    lines = made.err.splitlines()
    printed = [*lines[:-1], *made.out.splitlines(), lines[-1]]
    assert shapes(printed) == shapes(sample("effllm quantize fable -o fable-4bit --bits 4"))
    shutil.copytree("fable-4bit", "to-remove")
    others_have(at_home, user)
    typed = []
    for words in (words for path in DOCUMENTS for words in command_lines(path)):
        if is_cheap(words) and words not in typed:
            typed.append(words)
            ran = user.run(*on_fable(words), answers="y\n" if "rm" in words[:2] else None)
            assert ran.code == (1 if {"--schema", "--grammar"} & set(words) else 0), (words, ran.err)  # three tokens are no whole form
    assert len(typed) > 25, typed


# Of these the documents say themselves that they take their time, or they need a terminal, another model or an answer of the hub.
DEAR = {"chat", "serve", "transcribe", "doctor", "bench", "calibrate-sparsity", "kv-profile", "recall", "tinyllama", "qwen3-4b",
        "org/model", "./neurons", "32768", "--stats", "--against", "...", "--lora", "--image", "--video", "--audio", "--mcp", "author.json",
        "people.json", "letter.txt", "google/gemma-4-E2B-it-assistant"}


def others_have(home: Path, user: HubUser) -> None:
    """What the documents take other programs to have, and a Modelfile."""
    place = home / ".lmstudio" / "models" / "org" / "repo" / "Qwen3-8B-Q4_K_M.gguf"
    place.parent.mkdir(parents=True)
    assert user.run("export", "fable", "-o", place).code == 0
    OllamaTree(home / ".ollama" / "models").add("llama3.2:3b", place.read_bytes())
    (home / "Modelfile").write_text("FROM fable\n")


def is_cheap(words: list[str]) -> bool:
    return not DEAR & set(words) and (words[0] != "quantize" or "--dry-run" in words)


def on_fable(words: list[str]) -> list[str]:
    """A command line with names in the place of its placeholders: what is verified or removed is what effllm made. `run` gets a prompt."""
    model = "to-remove" if words == ["rm", "MODEL"] else "./fable-4bit" if words[0] in ("verify", "rm") else "fable"
    names = {"MODEL": model, "SMALL-MODEL": "fable", "FILE": "story.txt", "DIR": "made"}
    asks = words[0] == "run" and taken(words)["prompt"] is None
    return [*(names.get(word, word) for word in words), *(["hi"] if asks else [])]


def test_keys_of_json_have_the_names_that_are_told(at_home: Path, user) -> None:
    memory, speed = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("memory.md", "speed.md"))
    planned = user.run("plan", "fable", "--json").json
    (keys,) = re.findall(r"under fixed keys: (.+?)\.\n", memory)
    assert set(re.findall(r"`(\w+)`", keys)) <= planned.keys()
    figures = user.run("run", "fable", "hi", "-n", "1", "--json").json
    assert set(re.findall(r"`io\.(\w+)`", memory)) == {"disk_bytes_read", "disk_wait_s"} <= figures["io"].keys()
    (first, ours) = re.findall(r"its fields come first in JSON and CSV \((.+?);.+?ours after \((.+?)\)", speed, re.DOTALL)[0]
    from effllm.runtime.measuring.bench import BenchRow

    fields = [*BenchRow.__dataclass_fields__]
    begin, end = re.findall(r"`(\w+)`", first)
    ours = re.findall(r"`(\w+)`", ours)
    assert fields[0] == begin and set(ours) <= set(fields[fields.index(end) + 1 :]), json.dumps(fields)


def test_the_architecture_lists_every_package_of_the_runtime():
    table = re.findall(r"^\| `(\w+)/` \|", (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert table == sorted(path.parent.name for path in (ROOT / "runtime").glob("*/__init__.py"))


def test_a_change_is_reported_once():
    """Two versions of a line of the changelog begin alike: the longer one was meant."""
    lines = [line for line in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines() if line.startswith("- ")]
    begun = Counter(line[:27] for line in lines)
    assert not [begin for begin, count in begun.items() if count > 1]
