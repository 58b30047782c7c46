"""GGUF files of unsupported families, with contradictory metadata or without a tokenizer: a one-line error that names the problem."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_samples import write_model
from test_gguf import QUICK, small

from effllm import EffllmError, UsageError
from effllm.offload.checkpoint import CheckpointError
from effllm.runtime.config import read_config
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.tokenizer import Tokenizer


def key(name: str, value: object):
    """A change that states a key by hand."""
    def change(writer: gguf.GGUFWriter) -> None:
        kind = {int: "uint32", float: "float32", str: "string", bool: "bool", list: "array"}[type(value)]
        getattr(writer, f"add_{kind}")(name, value)
    return change


@pytest.mark.parametrize(("change", "named"), [
    (key("llama.expert_count", 8), "llama.expert_used_count"), (key("llama.expert_shared_count", 1), "llama.expert_shared_count = 1"),
    (key("llama.attention.value_length", 24), "llama.attention.value_length 24"),
    (key("llama.rope.dimension_count", 32), "llama.rope.dimension_count 32"),
    (key("llama.final_logit_softcapping", 30.0), "llama.final_logit_softcapping"),
    (key("llama.rope.scaling.type", "su"), "llama.rope.scaling.type 'su'"),
    (key("split.count", 3), "one of 3 parts of a split model"),
])
def test_what_no_family_runs_is_refused_by_name(tmp_path: Path, change: object, named: str) -> None:
    source = small(tmp_path / "source", "llama")
    write_model(source, tmp_path / "m.gguf", "F32", change=change)
    with pytest.raises(CheckpointError) as caught:
        prepare(tmp_path / "m.gguf", EngineOptions(**QUICK))
    assert named in caught.value.message and caught.value.hint and "\n" not in caught.value.message


def test_another_architecture_and_foreign_tensors(tmp_path: Path) -> None:
    source = small(tmp_path / "source", "llama")
    write_model(source, tmp_path / "m.gguf", "F32", arch="rwkv6")
    with pytest.raises(CheckpointError, match="architecture 'rwkv6'"):
        read_config(tmp_path / "m.gguf")
    write_model(source, tmp_path / "n.gguf", "F32",
                change=lambda writer: writer.add_tensor("blk.0.ffn_gate_exps.weight", np.zeros((2, 4, 4), np.float32)))
    with pytest.raises(CheckpointError, match="blk.0.ffn_gate_exps.weight"):
        prepare(tmp_path / "n.gguf", EngineOptions(**QUICK))
    write_model(source, tmp_path / "o.gguf", "F32", change=lambda writer: writer.add_uint32("llama.brand_new", 1))
    assert any("llama.brand_new" in text for text in read_config(tmp_path / "o.gguf").warnings)
    with pytest.raises(UsageError, match="llama.brand_new"):
        read_config(tmp_path / "o.gguf", strict=True)


def test_a_config_that_contradicts_the_tensors(tmp_path: Path) -> None:
    """A config of another size than the weights, and a missing tensor."""
    source = small(tmp_path / "source", "llama")
    raw = json.loads((source / "config.json").read_text())
    for change, named in (({"hidden_size": 32}, "shape"), ({"num_hidden_layers": 3}, "missing"),
                          ({"num_attention_heads": 3}, "attention.head_count")):
        (source / "config.json").write_text(json.dumps(raw | change))
        tensors = small(tmp_path / "whole", "llama")
        (tensors / "config.json").write_text(json.dumps(raw | change))
        try:
            write_model(tensors, tmp_path / "m.gguf", "F32")
        except ValueError:  # the rows of so many heads cannot be interleaved
            write_model(tensors, tmp_path / "m.gguf", "F32", arch="qwen2")
        with pytest.raises(EffllmError) as caught:
            prepare(tmp_path / "m.gguf", EngineOptions(**QUICK))
        assert named in caught.value.message, caught.value.message


def test_a_file_without_a_tokenizer(tmp_path: Path) -> None:
    write_model(small(tmp_path / "source", "llama"), tmp_path / "m.gguf", "F32")
    with pytest.raises(EffllmError, match="holds no tokenizer"):
        Tokenizer.load(tmp_path / "m.gguf", read_config(tmp_path / "m.gguf"))
