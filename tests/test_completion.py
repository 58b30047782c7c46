"""Shell completion: commands, and model names that contain colons."""

import os
import subprocess
import sys

import pexpect
import pytest
from hub_server import Hub
from hub_user import FABLE, HubUser, tiny

from effllm.cli.completion import join_at_colons
from effllm.runtime.library import storage

REPO = "org/name"


def test_ollama_925_the_shell_completes_commands_and_models(hub: Hub, user: HubUser) -> None:
    hub.add(REPO, files=tiny())
    assert user.run("pull", REPO).code == 0

    def completed(words: str) -> list[str]:
        env = {**os.environ, **user.env, "_EFFLLM_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        ran = subprocess.run([sys.executable, "-P", "-m", "effllm"], env=env, capture_output=True, text=True, timeout=60, check=False)
        assert not ran.stderr
        return ran.stdout.split()

    assert {"run", "rm"} <= set(completed("effllm r")) and completed("effllm run org/") == [REPO] and "fable" in completed("effllm show ")
    assert completed("effllm pull qwen3-0") == ["qwen3-0.6b"] and completed("effllm pull org/") == [REPO], "a pull is for what is not here"


@pytest.mark.parametrize(("words", "at", "line", "number", "before"), [
    (("effllm", "run", "fable", ":", "4"), 4, ("effllm", "run", "fable:4"), 2, "fable:"),
    (("effllm", "run", "fable", ":"), 3, ("effllm", "run", "fable:"), 2, "fable:"),
    (("effllm", "run", "fable:4"), 2, ("effllm", "run", "fable:4"), 2, ""),
    (("effllm", "run", "org/name@v1", ":", "m.gguf", ":", "4"), 6, ("effllm", "run", "org/name@v1:m.gguf:4"), 2, "org/name@v1:m.gguf:"),
    (("effllm", "run", "fable", ":", "4bit", "--s"), 5, ("effllm", "run", "fable:4bit", "--s"), 3, ""),
    (("effllm", "run", "fable", ":", "4bit", ""), 5, ("effllm", "run", "fable:4bit", ""), 3, "")])
def test_words_that_bash_broke_are_put_together(words: tuple[str, ...], at: int, line: tuple[str, ...], number: int, before: str) -> None:
    for apart in ("\n", " "):
        assert join_at_colons(apart.join(words), at) == (apart.join(line), number, before)


def test_bash_completes_names_with_a_colon(user: HubUser) -> None:
    """In a real bash, with its default word breaks and with a user's."""
    kept = storage.own_folder(user.env, "fable", f"local-{storage.local_fingerprint(FABLE)}", "4bit")
    kept.mkdir(parents=True)
    (kept / "effllm.json").write_text("{}")
    program = user.home / "bin" / "effllm"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m effllm "$@"\n')
    program.chmod(0o755)
    env = {**os.environ, **user.env, "PATH": f"{program.parent}:{os.environ['PATH']}", "PS1": "$ ", "TERM": "dumb"}
    shown = ["bash", "-c", "effllm --show-completion; exit $?"]  # the shell that asks is the one that is meant
    script = subprocess.run(shown, env=env, capture_output=True, text=True, check=True).stdout
    (user.home / "rc").write_text(script + "\nbind 'set enable-bracketed-paste off'\nPS1='ready> '\n")
    for breaks in (":", "COMP_WORDBREAKS=${COMP_WORDBREAKS//:}"):
        bash = pexpect.spawn("bash", ["--noprofile", "--rcfile", str(user.home / "rc"), "-i"], env=env, encoding="utf-8", timeout=60,
                             dimensions=(24, 200))
        bash.expect_exact("ready> ")
        bash.sendline(f"{breaks}; echo begun")
        bash.expect("begun\r\n.*ready> ")
        for typed in ("fable:4", "fable:"):
            bash.send(f"effllm show {typed}\t")
            bash.expect_exact("show fable:4bit ")
            bash.send("\x15")
        bash.sendline("exit")
        bash.expect(pexpect.EOF)
        bash.close()


def test_names_for_the_shell_come_without_heavy_imports() -> None:
    code = ("import os, sys\nimport effllm.cli.app\nfrom effllm.cli.options import complete_model\nassert 'fable' in complete_model('')\n"
            "print(sorted({'numpy', 'numba', 'torch', 'pydantic', 'huggingface_hub', 'jinja2', 'tokenizers', 'rich', 'ssl', 'http.client'}"
            " & set(sys.modules)))")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
