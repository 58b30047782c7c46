"""Output to streams of which some are terminals: each is checked on its own, in real processes."""

import os
import re
import subprocess
import sys
import threading

import pytest

from effllm.cli.app import main
from effllm.cli.environment import Environment
from effllm.cli.screen import Screen

STORY = "Tell me a story about the fox and the king."
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
CODES = ("\x1b", "\r", "\x07")
MINUTE = 60


def written(terminals: tuple[str, ...], *words: str, **variables: str) -> tuple[str, str]:
    """What `effllm` writes to stdout and stderr, of which those named are terminals."""
    held, pipes = {}, {}
    for name in ("stdout", "stderr"):
        held[name] = os.openpty() if name in terminals else os.pipe()
        pipes[name] = b""

    def read(name: str) -> None:
        try:
            while data := os.read(held[name][0], 4096):
                pipes[name] += data
        except OSError:
            return  # a terminal whose other side was closed

    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    with subprocess.Popen([sys.executable, "-P", "-m", "effllm", *words], stdin=subprocess.DEVNULL, stdout=held["stdout"][1],
                          stderr=held["stderr"][1], env=environment | {"TERM": "xterm-256color"} | variables) as process:
        readers = [threading.Thread(target=read, args=(name,)) for name in held]
        for name in held:
            os.close(held[name][1])
        for reader in readers:
            reader.start()
        assert process.wait(MINUTE) == 0
        for reader in readers:
            reader.join(MINUTE)
    for name in held:
        os.close(held[name][0])
    return pipes["stdout"].decode(), pipes["stderr"].decode()


@pytest.mark.parametrize(("terminals", "forced"), [((), "1"), (("stdout",), "1"), (("stderr",), ""), *(
    pytest.param(*each, marks=pytest.mark.slow) for each in (((), ""), (("stdout",), ""), (("stderr",), "1")))])
def test_a_stream_that_is_no_terminal_gets_no_codes(terminals: tuple[str, ...], forced: str) -> None:
    """Neither stream, nor when only one of them is a pipe. FORCE_COLOR asks for colour and gets that and nothing else, in remarks: no
    spinner, no line drawn again; the answer stays text."""
    out, err = written(terminals, "run", "fable", STORY, "-n", "20", "--stats", "--markdown", FORCE_COLOR=forced)
    assert out.strip() and "first token" in err
    if "stdout" not in terminals:
        assert not any(code in out for code in CODES), out
    if "stderr" not in terminals:
        assert bool(COLOUR.search(err)) == bool(forced)
        assert not any(code in COLOUR.sub("", err) for code in CODES), err


@pytest.mark.slow
def test_colour_by_variables_and_by_a_flag() -> None:
    words = ("run", "fable", STORY, "-n", "2")
    assert not COLOUR.search(written((), *words, FORCE_COLOR="1", NO_COLOR="1")[1])
    assert not COLOUR.search(written((), *words, FORCE_COLOR="0")[1])
    assert not COLOUR.search(written((), *words, "--no-color", FORCE_COLOR="1")[1])
    assert COLOUR.search(written(("stderr",), *words)[1]) and not COLOUR.search(written(("stderr",), *words, "--no-color")[1])


def test_forced_colour_forces_no_spinner_and_no_question() -> None:
    import io

    environment = Environment(io.StringIO(), io.StringIO(), io.StringIO(), {**os.environ, "FORCE_COLOR": "1"})
    assert environment.is_styled(environment.stderr) and not environment.can_redraw(environment.stderr) and not environment.is_interactive
    shown = Screen(environment, markdown=True)
    assert not shown.markdown, "into a pipe the answer stays as it is"
    assert main(["rm", "fable", "--no-color"], environment) == 2 and "\x1b" not in environment.stderr.getvalue()
