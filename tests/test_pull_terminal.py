"""A download in a real terminal: the display in 40 columns, Ctrl-C midway, and the download that resumes."""

import json
import os
import re
import socket
import sys
import time
from pathlib import Path

import pexpect
import pytest
from hub_server import Hub
from hub_user import FABLE, MINUTE, HubUser, on_disk, sharded, tiny

REPO = "org/name"
NARROW, WIDE = 40, 100
# What is drawn in place, up to what takes it away; a line of text that comes where it stood has an end of its own.
DRAWN = re.compile(r"\r\x1b\[K(?:\x1b\[2m)?([^\r\n\x1b]*)(?!(?:\x1b\[0m)?\r\n)(?=\x1b\[0m|\r|\Z)")


def at_terminal(user: HubUser, columns: int, *words: str) -> pexpect.spawn:
    env = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "XDG_CACHE_HOME", "EFFLLM_NO_KV_PROFILE") if name in os.environ}
    env |= user.env | {"TERM": "xterm", "XDG_CACHE_HOME": env.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))}
    return pexpect.spawn(sys.executable, ["-P", "-m", "effllm", *words], env=env, encoding="utf-8", timeout=MINUTE,
                         dimensions=(30, columns))


def ended(terminal: pexpect.spawn) -> str:
    """All that is still to be read, once the program has ended."""
    terminal.expect(pexpect.EOF)
    terminal.close()
    return terminal.before


def text(shown: str) -> str:
    """Without styles, and its broken lines joined."""
    return " ".join(re.sub(r"\x1b\[\d*m", "", shown).split())


@pytest.mark.parametrize("columns", (NARROW, pytest.param(WIDE, marks=pytest.mark.slow)))
def test_ctrl_c_in_the_middle_says_how_to_continue_and_the_next_pull_does(hub: Hub, user: HubUser, columns: int) -> None:
    repo = hub.add(REPO, files=tiny(30_000_000))
    hub.rate = 3e6
    terminal = at_terminal(user, columns, "pull", REPO)
    until = time.monotonic() + MINUTE
    while hub.served["model.safetensors"] < 10_000_000 and time.monotonic() < until:
        time.sleep(0.005)
    hub.rate = 1.5e4  # nearly stands still: it cannot end before Ctrl-C arrives, however late that is on a busy machine
    terminal.expect(r"downloading[^\r\n]*  [3-9]\d%")
    drawn = terminal.before + terminal.after
    terminal.sendintr()
    rest = ended(terminal)
    assert terminal.exitstatus == 130
    lines = [line for line in text(rest.rpartition("\x1b[K")[2].replace("^C", "")).split("effllm pull") if line]
    assert lines == ["stopped; the partial download is kept. ", f" {REPO} continues from here"], "one line, and nothing behind it"
    for line in DRAWN.findall(drawn + rest):
        assert len(line) < columns and re.fullmatch(r"|.*(%|/s|left)|stopped; .*", line), f"{line!r} ends in the middle of a figure"
    listed = user.run("list", "--json").json
    assert REPO in json.dumps(listed)
    hub.rate, before = None, hub.served["model.safetensors"]
    again = at_terminal(user, columns, "pull", REPO)
    said = text(ended(again))
    assert again.exitstatus == 0 and "of 28.61 MiB in 4 files, the others are downloaded already" in said
    assert on_disk(user.snapshot(REPO, repo.commit)) == repo.files
    assert hub.served["model.safetensors"] < before + 25_000_000, "what had come was loaded again"
    third = at_terminal(user, columns, "pull", REPO)
    assert "nothing: 28.61 MiB in 4 files are downloaded already" in text(ended(third))


@pytest.mark.slow
def test_bars_of_a_pull_that_quantizes(hub: Hub, user: HubUser) -> None:
    """Every line that is drawn fits and ends with a whole figure; the small model answers for itself."""
    hub.add(REPO, files=sharded(FABLE))
    hub.rate = 4e6
    terminal = at_terminal(user, NARROW, "pull", REPO, "--bits", "4")
    shown = ended(terminal)
    assert terminal.exitstatus == 0, shown
    drawn = [line for line in DRAWN.findall(shown) if "%" in line]
    assert len(drawn) > 5 and all(len(line) < NARROW and re.search(r"(%|/s|left)$", line) for line in drawn), drawn
    shares = [int(share) for share in re.findall(r"(\d+)%", " ".join(line for line in drawn if "downloading" in line))]
    assert shares == sorted(shares) and shares[-1] > 80
    assert f"effllm run {REPO}:4bit" in text(shown)
    assert user.run("verify", f"{REPO}:4bit").code == 0


def test_a_host_that_says_nothing_is_named_while_it_is_asked(user: HubUser) -> None:
    """Ctrl-C ends the waiting at once, and its line."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        user.endpoint = f"http://{address}"
        terminal = at_terminal(user, WIDE, "pull", REPO)
        terminal.expect_exact(f"asking {address} for {REPO}")
        began = time.monotonic()
        terminal.sendintr()
        assert ended(terminal).endswith("\r\x1b[K") and terminal.exitstatus == 130
        assert time.monotonic() - began < 5, "as long as a machine under load may take, and less than any patience with a host"
