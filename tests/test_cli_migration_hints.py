"""Commands and flags known from other programs: the same ones work, others are answered with the equivalent here."""

import codecs
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_cli_errors import world

from effllm import EffllmError
from effllm.cli import interrupt, migration_hints
from effllm.cli.app import main
from effllm.cli.environment import ASCII_FALLBACK
from effllm.cli.options import AnswerFlags
from effllm.cli.screen import Screen
from effllm.runtime.prepare import EngineOptions


def page(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a help page says."""
    assert main(list(words), world()) == 0
    return capsys.readouterr().out


def typed(*words: str) -> tuple[int, str, str]:
    environment = world(**{name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ})
    code = main(list(words), environment)
    return code, environment.stdout.getvalue(), environment.stderr.getvalue()


@pytest.mark.parametrize(("word", "hint"), [
    ("models", "use effllm list --all"), ("ps", "nothing stays in memory"), ("server", "use effllm serve"),
    ("remove", "use effllm rm"), ("download", "use effllm pull"), ("version", "effllm --version"),
    ("perplexity", "effllm eval ppl"), ("kv-profile", "use effllm eval kv-profile"),
    ("completion", "effllm --show-completion"), ("merge", "effllm export MODEL -o DIR --lora ADAPTER"),
    ("fuse", "effllm export MODEL -o DIR --lora"), ("finetune", "effllm run MODEL --lora ADAPTER"), ("tokenize", "POST /tokenize"),
    ("cp", "effllm alias NEW MODEL"), ("import", "effllm run ./model.gguf"), ("load", "effllm serve keeps models loaded"),
    ("status", "/api/ps"), ("imatrix", "--method gptq --calib FILE"), ("logs", "effllm session list"),
    ("create", "effllm alias NAME --modelfile FILE"), ("push", "hf upload"),
    ("fable", 'effllm run fable "your prompt"'), ("qwen3-4b", "effllm chat qwen3-4b")])
def test_a_command_of_another_program_is_answered_with_its_equivalent(word: str, hint: str) -> None:
    code, out, err = typed(word, "something", "--more")
    assert (code, out) == (2, "") and f"no such command '{word}'" in err and hint in err


def test_commands_that_are_named_exist(capsys: pytest.CaptureFixture[str]) -> None:
    for command in set(migration_hints.EQUIVALENT_COMMANDS.values()):
        flags = [word for word in command.split() if word.startswith("-")]
        said = page(capsys, *(word for word in command.split() if word not in flags), "--help")
        begin = "usage: effllm " + command.partition("--")[0]
        assert said.startswith(begin) and all(flag in said for flag in flags)


@pytest.mark.parametrize("prompt", ["-5 degrees", "--hello there", "- a list"])
def test_a_prompt_that_begins_with_a_dash_stands_after_two(prompt: str) -> None:
    code, out, err = typed("run", "fable", prompt)
    assert (code, out) == (2, "") and f"effllm run MODEL -- '{prompt}'" in err


@pytest.mark.parametrize("words", [("run",), ("eval", "ppl"), ("session",)])
def test_help_is_a_command_too(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert page(capsys, "help", *words) == page(capsys, *words, "--help") != ""
    assert page(capsys, "ls", "--help") == page(capsys, "list", "--help")


def test_names_that_both_have_are_taken() -> None:
    """What is wrong with the value is said of the flag here, so it was understood."""
    for given, here in (("--n-predict", "-n"), ("--temperature", "--temp"), ("--n-gpu-layers", "-ngl"), ("--top_k", "--top-k"),
                        ("--n_predict", "-n"), ("--reasoning", "--think")):
        assert typed("run", "fable", "hi", given, "x") == typed("run", "fable", "hi", here, "x")
        assert typed("run", "fable", "hi", f"{given}=x") == typed("run", "fable", "hi", here, "x")


@pytest.mark.parametrize(("words", "hint"), [
    (("-m", "fable", "-p", "hi"), "the model comes right after the command"), (("fable", "-p", "hi"), "the prompt comes after the model"),
    (("fable", "hi", "-seed", "4"), "with two dashes: --seed"), (("fable", "hi", "-temp", "0"), "with two dashes: --temp"),
    (("fable", "-cnv"), "effllm chat MODEL"), (("fable", "hi", "-st"), "answered once"), (("fable", "hi", "-fa", "on"), "leave it out"),
    (("-hf", "org/repo", "hi"), "effllm run org/repo:Q4_K_M"), (("fable", "hi", "--max-tokens", "5"), "use -n"),
    (("fable", "hi", "--num-ctx", "512"), "use -c"), (("fable", "hi", "--verbose"), "use --stats"),
    (("fable", "hi", "--mlock"), "--load mmap"), (("fable", "hi", "--kv", "q4_0"), "use 4bit"), (("fable", "hi", "-c", "0"), "at least 1"),
    (("fable", "hi", "--ram", "6"), "--ram 6G"), (("fable", "hi", "--bits", "ternary"), "effllm run MODEL:ternary"),
    (("fable", "hi", "--bits=4bit"), "hint: --bits 4"),
    (("fable", "hi", "--adapter-path", "x"), "use --lora"), (("fable", "hi", "--lora-scaled", "x:1"), "--lora ADAPTER:0.5"),
    (("fable", "hi", "--format", "json"), "--schema json"), (("fable", "hi", "-md", "x"), "use --draft"),
    (("fable", "hi", "--draft-model", "x"), "use --draft"), (("fable", "hi", "-ot", "exps=CPU"), "leave it out"),
    (("fable", "hi", "--chat-template", "chatml"), "the model has its own"), (("fable", "hi", "--no-mmproj"), "with the first image"),
    (("fable", "hi", "--think-budget", "9"), "use --reasoning-budget"), (("fable", "hi", "--quiet"), "2>/dev/null"),
    (("fable", "hi", "--hidethinking"), "including reasoning"), (("fable", "hi", "-tb", "1"), "use -t"),
    (("fable", "hi", "-sm", "none"), "the plan places layers"), (("fable", "hi", "-ts", "1,1"), "the plan places layers"),
    (("fable", "hi", "-nkvo"), "leave it out"), (("fable", "hi", "--rope-scaling", "yarn"), "--force"), (("fable", "hi", "-e"), "in bash"),
    (("fable", "hi", "--prompt-cache", "x"), "use --session"), (("fable", "hi", "--context-shift"), "use --overflow shift"),
    (("fable", "hi", "--draft-max", "8"), "how many are accepted"), (("fable", "hi", "-o", "temperature", "0.5"), "such as --temp 0.5"),
    (("fable", "hi", "-a", "cat.png"), "--image FILE"), (("fable", "hi", "--hf-token", "x"), "HF_TOKEN"),
    (("fable", "hi", "--ignore-chat-template"), "use --raw")])
def test_a_flag_of_another_program_is_answered_with_its_equivalent(words: tuple[str, ...], hint: str) -> None:
    code, out, err = typed("run", *words)
    assert (code, out) == (2, "") and hint in " ".join(err.split()), err


@pytest.mark.parametrize(("words", "hint"), [
    (("bench", "-m", "fable"), "without a flag: effllm bench MODEL"), (("chat", "-hf", "org/repo"), "effllm chat org/repo:Q4_K_M"),
    (("eval", "ppl", "-m", "fable", "-f", "x"), "without a flag: effllm eval ppl MODEL"),
    (("eval", "ppl", "fable", "-f", "x"), "use --text: effllm eval ppl --help"), (("-hf", "org/repo"), "effllm run org/repo:Q4_K_M"),
    (("serve", "fable", "--metrics"), "always there"), (("serve", "fable", "--verbose"), "each request is logged"),
    (("serve", "fable", "--embeddings"), "/v1/embeddings"), (("serve", "fable", "-a", "x"), "use --name"),
    (("serve", "fable", "--max-model-len", "9"), "use -c"), (("serve", "fable", "--ssl-key-file", "x"), "a proxy with TLS"),
    (("serve", "--models-dir", "x"), "effllm serve A.gguf B.gguf"), (("serve", "--sleep-idle-seconds", "9"), "use --keep-alive"),
    (("show", "fable", "--modelfile"), "effllm config show MODEL --origin"), (("pull", "x/y", "--token", "z"), "HF_TOKEN")])
def test_each_command_has_its_own_answers_to_flags_of_other_programs(words: tuple[str, ...], hint: str) -> None:
    code, out, err = typed(*words)
    assert (code, out) == (2, "") and hint in " ".join(err.split()), err


@pytest.mark.parametrize(("words", "hint"), [
    (("--no-color", "list"), "hint: flags go after the command: effllm COMMAND --no-color"),
    (("--temperature", "0", "run", "fable"), "flags go after the command: effllm COMMAND --temperature"),
    (("--nonsense", "run"), "hint: effllm --help"),
    (("quantize", "fable", "-o", "x", "--bits", "ternary"), "quantize MODEL -o DIR --spec SPEC"),
    (("quantize", "fable", "small", "Q4_K_M"), "effllm quantize MODEL -o DIR: effllm quantize --help"),
    (("eval", "ppl", "fable"), "effllm eval ppl MODEL --text FILE: effllm eval ppl --help"),
    (("run", "hi", "fable"), "hint: the model comes first, then the prompt: effllm run fable hi"),
    (("run", "two words", "fable"), "then the prompt: effllm run fable 'two words'")])
def test_words_in_another_order(words: tuple[str, ...], hint: str) -> None:
    code, out, err = typed(*words)
    assert code in (2, 3) and out == "" and hint in " ".join(err.split()), err


def test_a_template_is_shown_as_it_is_stored() -> None:
    config = Path(__file__).parent.parent / "models" / "fable" / "tokenizer_config.json"
    stored = json.loads(config.read_text())["chat_template"]
    assert typed("show", "fable", "--template") == (0, stored + "\n", "")
    assert json.loads(typed("show", "fable", "--template", "--json")[1]) == {"template": stored}


def test_a_hint_stands_without_flags_that_are_only_written_alike() -> None:
    assert typed("run", "fable", "hi", "--verbose")[2].splitlines()[0] == "effllm: no such option: --verbose"
    assert "--overflow" in typed("run", "fable", "hi", "--overflw", "shift")[2], "where nothing else is known"


def test_what_hints_name_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    """A hint is given to a command that has what it names."""
    pages = "".join(page(capsys, command, "--help") for command in ("run", "serve", "quantize", "export", "bench"))
    pages += page(capsys, "eval", "ppl", "--help")
    for here in {*migration_hints.EQUIVALENT_FLAGS.values(), *migration_hints.FLAG_SYNONYMS.values()}:
        assert f" {here}" in pages, here


def test_values_that_look_like_flags_stay_values() -> None:
    from effllm.cli.app import build, typer

    run = typer.main.get_command(build("run"))
    command = getattr(run, "commands", {}).get("run", run)
    line = ["fable", "-n40", "-s", "-seed", "--stop", "-fa", "-ngl", "3", "--", "-seed", "--top_k"]
    assert migration_hints.translate_flags(command, line) == line


def test_a_seed_given_as_a_system_prompt_is_reported() -> None:
    environment = world()
    migration_hints.note_seed_flag(AnswerFlags(system="42"), Screen(environment))
    assert "the seed is --seed 42" in environment.stderr.getvalue()
    for answer in (AnswerFlags(system="Answer in 42 words."), AnswerFlags(system="42", from_settings=frozenset({"system"})), AnswerFlags()):
        quiet = world()
        migration_hints.note_seed_flag(answer, Screen(quiet))
        assert quiet.stderr.getvalue() == ""


def test_a_budget_of_bytes_is_no_budget() -> None:
    with pytest.raises(EffllmError, match="6 bytes"):
        EngineOptions(ram="6")
    assert EngineOptions(ram="2000000000").ram == "2000000000"


def test_an_encoding_without_blocks_gets_letters_that_differ() -> None:
    assert codecs.encode("█▓▒·— 57 ± 3 日", "ascii", ASCII_FALLBACK) == b"#=-.-- 57 +- 3 ?"
    stream = io.TextIOWrapper(io.BytesIO(), "latin-1", errors=ASCII_FALLBACK)
    stream.write("é “so” ± █")
    stream.flush()
    assert stream.buffer.getvalue() == "é \"so\" ± #".encode("latin-1")


DESTRUCTOR = """
import sys, time
from effllm.cli.interrupt import silence_unraisable
silence_unraisable()

class Broken:
    def __del__(self):
        raise AttributeError("half made")

class Interrupted:
    def __del__(self):
        raise KeyboardInterrupt

try:
    Broken()
    Interrupted()
    time.sleep(50)
    print("lost")
except KeyboardInterrupt:
    print("interrupted")
"""


def test_what_falls_apart_says_nothing_and_an_interrupt_in_it_is_not_lost() -> None:
    """It ends at once what the program waits for."""
    done = subprocess.run([sys.executable, "-c", DESTRUCTOR], capture_output=True, text=True, timeout=40)
    assert (done.stdout, done.stderr) == ("interrupted\n", "")


@contextmanager
def stopped_and_back(program: Path) -> Iterator[tuple[int, int]]:
    """A program that a shell started in a terminal of its own, behind Ctrl-Z and fg: the shell's id and the terminal. Others may stop it at
    any moment too, as a machine does that makes room for a measurement: then the shell has the terminal, and `types` gives it back."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], os.environ | {"TERM": "xterm", "PS1": "$ "})
    try:
        os.write(terminal, f"'{sys.executable}' '{program}'\r".encode())
        shown, deadline = b"", time.monotonic() + 60
        while b"ready" not in shown and b"Stopped" not in shown:
            assert time.monotonic() < deadline, shown
            shown += read_until(terminal, b"ready", seconds=0.5)
        os.write(terminal, b"\x1a")
        while b"Stopped" not in shown:
            assert time.monotonic() < deadline, shown
            shown += read_until(terminal, b"Stopped", seconds=0.5)
        yield pid, terminal
    finally:
        os.kill(pid, signal.SIGHUP)
        os.close(terminal)
        os.waitpid(pid, 0)


def test_ctrl_z_goes_to_the_shell_and_fg_comes_back(tmp_path: Path) -> None:
    """At the line of a chat, which reads every key itself."""
    program = tmp_path / "line.py"
    program.write_text("import sys\nfrom pathlib import Path\nfrom effllm.cli.editor import Editor\n"
                       f"history = Path({str(tmp_path / 'history')!r})\n"
                       "editor = Editor(sys.stdout, False, history, lambda: ['ready'], lambda line: [], print)\n"
                       "print('said', repr(editor.read()))\n")
    with stopped_and_back(program) as (shell, terminal):
        types(shell, terminal, b"hello", b"said 'hello'", lambda: True)


def test_what_is_typed_during_an_answer_stays_out_of_it_after_ctrl_z_too(tmp_path: Path) -> None:
    """The shell gives the terminal back as it keeps it for itself, where what is typed is shown."""
    program = tmp_path / "answer.py"
    program.write_text("import sys\nfrom effllm.cli.interrupt import without_echo\nwith without_echo(sys.stdin):\n"
                       "    print('ready', flush=True)\n    print('read', sys.stdin.readline().strip()[::-1])\n")
    with stopped_and_back(program) as (shell, terminal):
        shown = types(shell, terminal, b"yal", b"read lay", lambda: not termios.tcgetattr(terminal)[3] & termios.ECHO)
        assert b"yal" not in shown


def test_ctrl_c_as_soon_as_a_terminal_shows_nothing_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, sets = termios.tcsetattr, []

    def pressed(*given: object) -> None:
        usual(*given)
        sets.append(given)
        if len(sets) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(termios, "tcsetattr", pressed)
    here, there = pty.openpty()
    with open(there) as terminal, open(here, "wb"):
        with pytest.raises(KeyboardInterrupt), interrupt.without_echo(terminal):
            pytest.fail("it goes on")
        assert termios.tcgetattr(there)[3] & termios.ECHO and len(sets) == 2
    assert signal.getsignal(signal.SIGCONT) == signal.SIG_DFL


def test_a_terminal_that_does_not_tell_where_its_cursor_is_gets_no_warning_of_a_library(tmp_path: Path) -> None:
    program = tmp_path / "line.py"
    program.write_text("import sys\nfrom pathlib import Path\nfrom effllm.cli.editor import Editor\n"
                       f"editor = Editor(sys.stdout, False, Path({str(tmp_path / 'history')!r}), lambda: [], lambda line: [], print)\n"
                       "editor._session.app.renderer.CPR_TIMEOUT = 0.1\nprint('said', repr(editor.read()))\n")
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(sys.executable, [sys.executable, str(program)], os.environ | {"TERM": "xterm"})
    try:
        read_until(terminal, b"\x1b[6n", cursor=False)
        time.sleep(0.4)
        os.write(terminal, b"hello\r")
        assert b"WARNING" not in read_until(terminal, b"said 'hello'", cursor=False)
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


def types(shell: int, terminal: int, line: bytes, wanted: bytes, is_ready: Callable[[], bool]) -> bytes:
    """Give the terminal to the program that the shell has stopped, as often as somebody stops it, and type a line once it `is_ready`; what
    came from then on until it was `wanted`."""
    deadline, asked, typed_at, shown = time.monotonic() + 60, 0.0, 0.0, b""
    while time.monotonic() < deadline:
        shown += read_until(terminal, wanted, seconds=0.05)
        if wanted in shown:
            return shown
        if os.tcgetpgrp(terminal) == shell:
            typed_at = 0.0
            if time.monotonic() > asked + 0.5:  # it is slow to give it away on a busy machine
                os.write(terminal, b"\x15fg\r")
                asked = time.monotonic()
        elif is_ready() and time.monotonic() > typed_at + 5:
            os.write(terminal, b"\x15" + line + b"\r")
            typed_at, shown = time.monotonic(), b""
    pytest.fail(f"{wanted!r} never came: {shown!r}")


def read_until(terminal: int, wanted: bytes, cursor: bool = True, seconds: float | None = None) -> bytes:
    """What came until it was `wanted`, or in so many seconds; with `cursor` the terminal tells where that is."""
    seen, deadline = b"", time.monotonic() + (60 if seconds is None else seconds)
    while wanted not in seen:
        came = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0]
        if not came and seconds is not None:
            return seen
        assert came, seen
        seen += os.read(terminal, 4096)
        if cursor and b"\x1b[6n" in seen:  # the library asks where the cursor is
            os.write(terminal, b"\x1b[1;1R")
            seen = seen.replace(b"\x1b[6n", b"")
    return seen


@pytest.mark.parametrize("words", [("-m", "fable", "-p", "hi"), ("-p", "hi"), ("--model", "fable"), ("-i",)])
def test_flags_of_llama_cpp_without_a_command_lead_to_one(words: tuple[str, ...]) -> None:
    code, out, err = typed(*words)
    assert (code, out) == (2, "") and err.splitlines()[-1].split(": ")[-1].startswith(("effllm run MODEL", "effllm chat MODEL")), err


def test_a_pull_without_a_model_is_told_of_one_that_can_be_pulled() -> None:
    code, _, err = typed("pull")
    assert code == 2 and "effllm list --all shows names of models that can be pulled: effllm pull qwen3-0.6b" in err


@pytest.mark.parametrize("command", ["chat", "show", "plan", "rm"])
def test_a_command_without_its_model_says_how_one_is_found(command: str) -> None:
    code, _, err = typed(command)
    assert code == 2 and f"effllm list shows local models: effllm {command} fable" in err


@pytest.mark.parametrize(("words", "hint"), [
    (("config", "set", "temp", "1"), "lines of effllm.toml"), (("config", "temp"), "effllm config show --help"),
    (("config", "get", "temp"), "effllm config show --origin shows every setting"), (("config", "list"), "effllm config show --origin"),
    (("config", "show", "temp"), "effllm config show --origin"), (("config", "show", "ctx_size"), "effllm config show --origin"),
    (("session", "resume", "tale"), "effllm chat MODEL --session NAME"), (("session", "ls"), "effllm session list"),
    (("session", "frob"), "effllm session --help"), (("list", "fable"), "effllm show MODEL"), (("doctor", "fable"), "effllm plan MODEL"),
    (("session", "list", "x"), "effllm session list --help"), (("alias", "rm", "mine"), "effllm alias --rm mine removes that one"),
    (("alias", "list"), "effllm alias lists yours")])
def test_a_word_that_means_something_else_here_gets_the_next_step(words: tuple[str, ...], hint: str) -> None:
    code, out, err = typed(*words)
    assert (code, out) == (2, "") and hint in err.splitlines()[-1]


@pytest.mark.parametrize("words", [("-ngl", "auto"), ("--n-gpu-layers", "all")])
def test_layers_by_a_word_are_told_to_be_left_to_the_plan(words: tuple[str, ...]) -> None:
    code, out, err = typed("run", "fable", "hi", *words)
    assert (code, out) == (2, "") and f"takes a number of layers, not '{words[1]}'" in err and "hint: leave it out: the plan " in err
