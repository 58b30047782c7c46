"""Downloads in tests: a hub on the loopback, a home of its own, and the program as a call and as a process."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from effllm.cli.app import main
from effllm.cli.environment import Environment
from effllm.runtime.pull import run_estimate

FABLE = Path(__file__).resolve().parent.parent / "models" / "fable"
MINUTE = 60


def measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a terminal a pull benchmarks a machine that has no measurements yet: seconds per test, and entries in the user's cache."""
    monkeypatch.setattr(run_estimate, "missing_measurement", lambda run: None)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@dataclass
class HubUser:
    """A user with a home folder who types commands."""

    home: Path
    endpoint: str
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        return {"HOME": str(self.home), "HF_ENDPOINT": self.endpoint, "XDG_DATA_HOME": str(self.home / "data"),
                "XDG_CONFIG_HOME": str(self.home / "config"), "HF_HOME": str(self.home / "hf"), "TERM": "dumb", **self.variables}

    def run(self, *words: str | Path, answers: str | None = None, **variables: str) -> CommandResult:
        """Run a command; with `answers` at a terminal."""
        kind = io.StringIO if answers is None else Terminal
        environment = Environment(kind(answers or ""), io.StringIO(), kind(), self.env | variables)
        code = main([str(word) for word in words], environment)
        return CommandResult(code, environment.stdout.getvalue(), environment.stderr.getvalue())

    def start(self, *words: str | Path, **variables: str) -> subprocess.Popen:
        """Start a separate process."""
        return self.start_python("-m", "effllm", *words, **variables)

    def start_python(self, *words: str | Path, **variables: str) -> subprocess.Popen:
        """Run a separate interpreter."""
        env = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "XDG_CACHE_HOME") if name in os.environ} | self.env | variables
        env.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))  # compiled kernels
        command = [sys.executable, "-P", *map(str, words)]
        return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # ignored in a background job

    def snapshot(self, repo: str, commit: str) -> Path:
        return self.home / "hf" / "hub" / f"models--{repo.replace('/', '--')}" / "snapshots" / commit

    def blobs(self, repo: str) -> dict[str, Path]:
        folder = self.home / "hf" / "hub" / f"models--{repo.replace('/', '--')}" / "blobs"
        return {path.name: path for path in folder.iterdir()} if folder.is_dir() else {}


@dataclass(frozen=True)
class CommandResult:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict:
        assert self.code == 0, self.err
        (line,) = self.out.splitlines()
        return json.loads(line)

    def refused(self, code: int) -> str:
        """Both lines of the error, after checking that there are two, and the exit code."""
        assert self.code == code, (self.code, self.err)
        lines = self.err.splitlines()
        assert lines[-2].startswith("effllm: ") and lines[-1].startswith("hint: "), self.err
        assert "Traceback" not in self.err
        return "\n".join(lines[-2:])


def sharded(folder: Path, parts: int = 3) -> dict[str, bytes]:
    """The files of a model folder with its weights cut into shards and an index."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    raw = files.pop("model.safetensors")
    length = int.from_bytes(raw[:8], "little")
    heads = {name: entry for name, entry in json.loads(raw[8 : 8 + length]).items() if name != "__metadata__"}
    names = sorted(heads)
    weight_map: dict[str, str] = {}
    for part in range(parts):
        name = f"model-{part + 1:05}-of-{parts:05}.safetensors"
        at, entries, blobs = 0, {}, []
        for tensor in names[part::parts]:  # layers are spread over all shards
            begin, end = heads[tensor]["data_offsets"]
            entries[tensor] = heads[tensor] | {"data_offsets": [at, at + end - begin]}
            blobs.append(raw[8 + length + begin : 8 + length + end])
            at += end - begin
            weight_map[tensor] = name
        head = json.dumps(entries).encode()
        files[name] = len(head).to_bytes(8, "little") + head + b"".join(blobs)
    files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    return files


def tiny(size: int = 2_000_000, seed: int = 0) -> dict[str, bytes]:
    """A model small enough for every test: `size` bytes of weights that nothing reads."""
    config = {"model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 2, "torch_dtype": "float16"}
    values = np.random.default_rng(seed).integers(0, 1 << 16, size // 2, np.uint16).view(np.float16)
    return {"config.json": json.dumps(config).encode(), "model.safetensors": save({"weights": values}),
            "README.md": b"---\nlicense: mit\n---\n# A model\n", "tokenizer.json": b'{"version": "1.0"}' + b" " * 1000}


def on_disk(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
