"""Completion in real shells, as `--install-completion` sets it up: what the program receives after tab and return."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable

import pexpect
import pytest
from hub_user import FABLE, HubUser

from effllm.quant.kv import CODECS, WIDTHS
from effllm.runtime.library import storage

MINUTE = 60
READY = "ready> "
# The program for the shell's questions; asked for anything else it says what it was given.
PROGRAM = """#!/bin/sh
[ -n "$_EFFLLM_COMPLETE" ] || [ "$1" = --install-completion ] || { printf 'given'; printf ' <%s>' "$@"; echo; exit; }
exec PYTHON -P -m effllm "$@"
"""
SHELLS = {"bash": ["bash", "--noprofile", "-i"], "zsh": ["zsh", "-i"], "fish": ["fish", "-i"]}
SETTINGS = {"bash": (".bashrc", "bind 'set enable-bracketed-paste off'\nPS1='ready> '\n"),
            "zsh": (".zshrc", "PROMPT='ready> '\nunset zle_bracketed_paste\nzstyle ':completion:*' menu no\nsetopt no_prompt_sp\n"),
            "fish": (".config/fish/config.fish", "function fish_prompt; printf 'ready> '; end\nfunction fish_right_prompt; end\n"
                                                 "set -g fish_greeting\nset -g fish_autosuggestion_enabled 0\n")}


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest, user: HubUser) -> Callable[[str], str]:
    """What the program receives when a user types a line with tabs, then return, in a shell that `--install-completion` was run in."""
    name = request.param
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    kept = storage.own_folder(user.env, "fable", f"local-{storage.local_fingerprint(FABLE)}", "4bit")
    kept.mkdir(parents=True)
    (kept / "effllm.json").write_text("{}")
    (user.home / "a file").write_text("")
    program = user.home / "bin" / "effllm"
    program.parent.mkdir()
    program.write_text(PROGRAM.replace("PYTHON", sys.executable))
    program.chmod(0o755)
    env = {**os.environ, **user.env, "PATH": f"{program.parent}:{os.environ['PATH']}", "TERM": "dumb" if name == "bash" else "xterm"}
    del env["XDG_CONFIG_HOME"]
    file, text = SETTINGS[name]
    (user.home / file).parent.mkdir(parents=True, exist_ok=True)
    (user.home / file).write_text(text)
    installed = pexpect.run(f"{name} -c 'effllm --install-completion; true'", env=env, cwd=user.home, encoding="utf-8",
                            timeout=MINUTE)
    assert f"{name} completion installed" in installed, installed
    terminal = pexpect.spawn(SHELLS[name][0], SHELLS[name][1:], env=env, cwd=user.home, encoding="utf-8", timeout=MINUTE,
                             dimensions=(40, 200))
    terminal.expect_exact(READY)

    def given(keys: str) -> str:
        terminal.send(keys + "\r")
        terminal.expect(r"given((?: <[^>]*>)*)\r?\n")
        said = terminal.match.group(1).strip()
        terminal.expect_exact(READY)
        return said

    yield given
    terminal.close(force=True)


@pytest.mark.parametrize(("line", "told"), [
    ("run fable --kv ", [*CODECS, *(f"{bits}bit" for bits in WIDTHS), "auto"]), ("run fable --kv 4", ["4bit"]),
    ("run fable --bits ", ["8", "6", "5", "4", "3", "2"]), ("run fable --device c", ["cpu", "cuda"]), ("run fable --schema ", []),
    ("export fable --type Q", ["Q8_0", "Q4_0"]), ("quantize fable --method s", ["smooth", "spqr"])])
def test_the_words_that_a_flag_takes_are_reported(line: str, told: list[str]) -> None:
    variables = {**os.environ, "_EFFLLM_COMPLETE": "complete_bash", "COMP_WORDS": f"effllm {line}", "COMP_CWORD": str(len(line.split(" ")))}
    ran = subprocess.run([sys.executable, "-P", "-m", "effllm"], env=variables, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == told


@pytest.mark.slow
def test_a_tab_completes_commands_models_and_values(shell: Callable[[str], str]) -> None:
    assert shell("effllm quan\t") == "<quantize>", "at the first tab of a new shell"
    assert shell("effllm show fable:4\t") == "<show> <fable:4bit>"
    assert shell("effllm run fable --device cp\t") == "<run> <fable> <--device> <cpu>"
    assert shell("effllm run fable --temp 0.5 --load mm\t--seed 4") == "<run> <fable> <--temp> <0.5> <--load> <mmap> <--seed> <4>"
    assert shell("effllm run fable --kv au\t--bits 4") == "<run> <fable> <--kv> <auto> <--bits> <4>"
    assert shell("effllm export fable --type Q8\t") == "<export> <fable> <--type> <Q8_0>"
    assert shell("effllm run fable --kv-wi\t64") == "<run> <fable> <--kv-window> <64>"
    assert shell("effllm session r\t") == "<session> <rm>"
    assert shell("effllm run a\\ fi\t").removesuffix("/>") == "<run> <a file>", "what is no name may be a path"
