"""`--ram` holds for measuring commands: their references take no more than was asked for."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from test_complaints_memory import MEASURED

import effllm
from effllm.offload.size import parse_size
from effllm.runtime.calibrate import built_in_text
from effllm.runtime.source import open_store

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
MANY = 80_000  # tokens: a table of their log-probabilities for a piece of a text is larger than the model
SHAPE = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096,
         "num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 4096, "max_position_embeddings": 2048,
         "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "bfloat16"}

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="what a process holds is read from /proc")


def held(*words: object) -> tuple[int, str]:
    """The most memory that a command held in a process of its own, and what it wrote."""
    command = [sys.executable, "-c", MEASURED, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(re.search(r"^VmHWM:\s+(\d+) kB", done.stderr, re.MULTILINE)[1]) * 1024, done.stdout


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fable with rows for tokens that it has not."""
    folder = shutil.copytree(FABLE, tmp_path_factory.mktemp("wide") / "model")
    config, rng, tensors = json.loads((folder / "config.json").read_text()), np.random.default_rng(0), {}
    with open_store(FABLE) as store:
        for name, info in store.tensors.items():
            values = (store.read(info).view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(info.shape)
            if info.shape[0] == config["vocab_size"]:
                values = np.concatenate([values, rng.normal(0, 0.05, (MANY - len(values), *info.shape[1:])).astype(np.float32)])
            tensors[name] = values.astype(np.float16)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": MANY, "torch_dtype": "float16"}))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("more", (pytest.param((), marks=pytest.mark.slow), ("--kv", "4bit", "--by-token")))
def test_two_models_that_are_compared_stay_within_it(more: tuple[str, ...], wide: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(built_in_text()[:2500])
    most, said = held("eval", "kld", wide, "--text", tmp_path / "text.txt", "-c", 400, "--device", "cpu", "--ram", "260Mi", "--json", *more)
    assert json.loads(said)["tokens"] > 50 and most <= parse_size("260Mi"), f"{most / 2**20:.0f} MiB"


def test_the_roof_of_a_benchmark_is_measured_within_it(tmp_path: Path) -> None:
    """Beside 182 MiB of weights there is no room for as much again: they are read themselves."""
    (tmp_path / "shape.json").write_text(json.dumps(SHAPE))
    most, said = held("bench", "--synthetic", tmp_path / "shape.json", "-p", 0, "-n", 4, "-r", 1, "-c", 256, "--device", "cpu",
                      "--ram", "400Mi", "--json")
    assert most <= parse_size("400Mi"), f"{most / 2**20:.0f} MiB"
    (row,) = json.loads(said)
    assert row["roof_bandwidth"] > 1e9
