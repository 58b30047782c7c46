"""Plans against processes: `effllm plan` in one process reports the memory that a run in another requests and does not exceed."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pexpect
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

import effllm as package

FABLE = Path(package.__path__[0]) / "models" / "fable"
MANY = 40_000  # tokens


def effllm(*arguments: str) -> dict:
    done = subprocess.run([sys.executable, "-m", "effllm", *arguments, "--json"], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def refused_with(*arguments: str) -> float:
    """MiB that a command says it needs where it gets far too little."""
    done = subprocess.run([sys.executable, "-m", "effllm", *arguments, "--ram", "60M"], capture_output=True, text=True, check=False)
    assert done.returncode == 4, done.stderr
    return float(re.search(r"needs ([\d.]+) MiB of memory", done.stderr)[1])


@pytest.fixture(scope="module")
def talkative(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fable with a large vocabulary, whose tokenizer takes far more memory than one of some thousand tokens."""
    folder = shutil.copytree(FABLE, tmp_path_factory.mktemp("vocabulary") / "model")
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    for name, values in tensors.items():
        if values.shape[0] == config["vocab_size"]:
            tensors[name] = torch.zeros((MANY, *values.shape[1:]), dtype=values.dtype)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": MANY}))
    letters = [chr(0x4E00 + i) for i in range(200)]
    merges = [[a, b] for a in letters for b in letters][: MANY - len(letters)]
    vocabulary = {token: i for i, token in enumerate([*letters, *(a + b for a, b in merges)])}
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "pre_tokenizer": None,
        "post_processor": None, "decoder": None, "model": {"type": "BPE", "vocab": vocabulary, "merges": merges}}))
    return folder


def test_a_run_stays_below_its_plan():
    planned = effllm("plan", "fable")
    words = "word " * 500
    ran = effllm("run", "fable", "--raw", words, "-n", "300", "--ignore-eos", "--seed", "1")
    assert ran["usage"]["prompt_tokens"] > 500 and ran["usage"]["completion_tokens"] == 300
    peak = ran["memory"]["peak_rss_bytes"]
    assert peak <= planned["total_bytes"], f"{peak / 2**20:.0f} MiB used, {planned['total_bytes'] / 2**20:.0f} MiB planned"
    assert ran["memory"]["weights_bytes"] == planned["weights_bytes"] and ran["memory"]["kv_bytes"] <= planned["kv_bytes"]


@pytest.mark.parametrize("flags", [pytest.param((), marks=pytest.mark.slow), ("--bits", "4", "--kv", "4bit")],
                         ids=["as published", "4 bits, packed"])
def test_a_chat_stays_below_its_plan(flags: tuple[str, ...], tmp_path: Path):
    """Its plan counts the line editor, which a run does not have: about 10 MiB, as docs/memory.md says."""
    waits, has_line = "\x1b[?2004h", "\x1b[?2004l"
    environment = os.environ | {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", "XDG_STATE_HOME": str(tmp_path)}
    command = ["-P", "-m", "effllm", "chat", "fable", "--stats", "-n", "8", "--seed", "1", *flags]
    terminal = pexpect.spawn(sys.executable, command, env=environment, encoding="utf-8", timeout=90, dimensions=(40, 160))
    terminal.expect_exact(waits)
    for words in ("Tell me a story.", "The fox went to the king and said that he was hungry. " * 30):
        terminal.send(words + "\r")
        terminal.expect_exact(has_line)
        terminal.expect_exact(waits)
    most, planned = map(float, re.search(r"peak memory ([\d.]+) MiB, ([\d.]+) MiB planned", terminal.before).groups())
    used = int(re.search(r"context (\d+) of 2048", terminal.before)[1])
    held = psutil.Process(terminal.pid).memory_info().rss / 2**20
    terminal.send("\x04")
    terminal.expect(pexpect.EOF)
    assert used > 350, "more than the tokens that stay exact, so that pages are packed"
    assert held <= most + 1 and most <= planned, f"{most} MiB used, {planned} MiB planned"
    if not flags:
        assert 5 < planned - effllm("plan", "fable")["total_bytes"] / 2**20 < 20


def test_a_plan_and_a_run_ask_for_the_same_memory(talkative: Path):
    """Also where a tokenizer takes much of it: it is there when a run plans, so it has to be there when `plan` does."""
    both = ("plan",), ("run", "Hello")
    small, large = ([refused_with(command, model, *words) for command, *words in both] for model in ("fable", str(talkative)))
    for planned, asked in (small, large):
        assert planned == pytest.approx(asked, rel=0.015), (planned, asked)
    assert large[0] > small[0] + 15
