"""GGUF files of MiMo V2 Flash, MiniMax M3, MPT, StarCoder 1, DBRX and EXAONE 3: particular metadata, and what is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from export_models import exported, model
from gguf_samples import Reader

from effllm import EffllmError
from effllm.offload.gguf_header import GgufHeader
from effllm.runtime.config import ModelConfig
from effllm.runtime.gguf.architectures import architecture
from effllm.runtime.gguf.config import model_config
from effllm.runtime.gguf.store import open_gguf_store, read_header
from effllm.runtime.gguf.tensor_mapping import GgufFile, map_tensors

NAMES = ("mimo_v2_flash", "minimax_m3_vl_text", "mpt", "gpt_bigcode", "dbrx", "bloom", "jais2")


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GgufHeader]:
    folder = tmp_path_factory.mktemp("files")
    return {name: read_header(exported(model(name, folder / name), folder / f"{name}.gguf")) for name in NAMES}


def read(header: GgufHeader, strict: bool = True, **changes: object) -> ModelConfig:
    name = header.metadata["general.architecture"]
    stated = header.metadata | {f"{name}.{key.replace('__', '.')}": value for key, value in changes.items()}
    return model_config(replace(header, metadata={key: value for key, value in stated.items() if value is not None}), {}, strict)


@pytest.mark.parametrize("name", NAMES)
def test_no_key_is_ignored(headers: dict[str, GgufHeader], name: str) -> None:
    assert read(headers[name]).warnings == ()


def test_lists_of_mimo_continue_for_layers_that_guess_ahead(headers: dict[str, GgufHeader], tmp_path: Path) -> None:
    header = headers["mimo_v2_flash"]
    plain = read(header)
    assert [plain.kv_heads_of(layer)[0] for layer in range(3)] == [2, 4, 4] and plain.windows == (None, 24, 24)
    longer = {"block_count": 4, "nextn_predict_layers": 1, "attention__head_count_kv": np.array([2, 4, 4, 4]),
              "attention__sliding_window_pattern": np.array([0, 1, 1, 1])}
    assert read(header, **longer) == plain
    with open_gguf_store(header.path) as store:
        held = set(store.tensors)
    added = {"blk.3.nextn.eh_proj.weight", "blk.3.attn_q.weight", "blk.3.ffn_gate_exps.weight"}
    behind = {name: replace(header.tensors["blk.1.attn_q.weight"], name=name) for name in added}
    file = GgufFile(replace(header, tensors=header.tensors | behind), {}, architecture(header.path, "mimo2"), {})
    assert set(map_tensors(file, plain, "f16", False).tensors) == held
    assert read(header, attention__value_scale=None).multipliers == ()
    assert Reader(header.path).fields["mimo2.attention.value_length"].contents() == 16


@pytest.mark.parametrize(("name", "changes", "said"), [
    ("mimo_v2_flash", {"attention__head_count_kv": np.array([2, 2, 2])}, "twice as many KV heads"),
    ("mimo_v2_flash", {"attention__head_count_kv": np.array([2, 4])}, "expected a number for each of 3 layers"),
    ("mimo_v2_flash", {"nextn_predict_layers": 3}, "nextn_predict_layers 3"),
    ("mimo_v2_flash", {"rope__dimension_count": 64}, "rope.dimension_count 64 of heads of 32"),
    ("mimo_v2_flash", {"expert_gating_func": 1}, "expert_gating_func is not 2"),
    ("minimax_m3_vl_text", {"expert_weights_norm": False}, "expert_weights_norm false"),
    ("minimax_m3_vl_text", {"expert_shared_count": 2}, "expert_shared_count"),
    ("minimax_m3_vl_text", {"attention__indexer__head_count": 1}, "indexer.head_count 1"),
    ("mpt", {"attention__max_alibi_bias": 16.0}, "slopes of this family reach 8"),
    ("mpt", {"attention__max_alibi_bias": None}, "lacks key mpt.attention.max_alibi_bias"),
    ("gpt_bigcode", {"attention__head_count_kv": 4}, "one for all queries"),
    ("dbrx", {"attention__layer_norm_epsilon": 1e-6}, "an epsilon of 1e-05"),
    ("dbrx", {"attention__clamp_kqv": None}, "lacks key dbrx.attention.clamp_kqv")])
def test_what_a_file_cannot_say_is_named(headers: dict[str, GgufHeader], name: str, changes: dict[str, object], said: str) -> None:
    with pytest.raises(EffllmError) as caught:
        read(headers[name], **changes)
    assert said in f"{caught.value.message} {caught.value.hint}" and caught.value.hint and "\n" not in caught.value.message


def test_exaone_3_has_the_defaults_of_files_rather_than_of_its_configs(tmp_path: Path) -> None:
    header = read_header(exported(model("exaone", tmp_path / "source"), tmp_path / "m.gguf"))
    left_out = ("exaone.attention.head_count_kv", "exaone.rope.freq_base")
    assert set(left_out) <= header.metadata.keys()
    config = model_config(replace(header, metadata={key: value for key, value in header.metadata.items() if key not in left_out}), {})
    assert config.num_key_value_heads == config.num_attention_heads and config.rope.theta == 10_000.0
