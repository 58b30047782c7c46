"""Which layers of a GGUF file have their own sparse-attention indexer, and what is refused of one."""

from dataclasses import replace

import numpy as np
import pytest
from export_models import exported, model

from effllm import EffllmError
from effllm.offload.gguf_header import GgufHeader
from effllm.runtime.config import ModelConfig
from effllm.runtime.gguf.config import model_config
from effllm.runtime.gguf.store import read_header

NAMES = ("deepseek_v32", "glm_moe_dsa", "hy_v4")
GLM_5 = (0, 0, 2)
EARLY = (0, 1, 2, 2, 2, 2, 6, 6)  # of GLM 5.2, as its config has it


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GgufHeader]:
    folder = tmp_path_factory.mktemp("indexed")
    return {name: read_header(exported(model(name, folder / name), folder / f"{name}.gguf")) for name in NAMES}


def read(header: GgufHeader, **changes: object) -> ModelConfig:
    name = header.metadata["general.architecture"]
    stated = header.metadata | {f"{name}.{key.replace('__', '.')}": value for key, value in changes.items()}
    return model_config(replace(header, metadata={key: value for key, value in stated.items() if value is not None}), {})


def test_files_say_which_layers_choose(headers: dict[str, GgufHeader]) -> None:
    header = headers["glm_moe_dsa"]
    assert read(header).indexer.source_layers == GLM_5
    types = np.array([1, 0, 1, 1], np.int32)
    behind = read(header, block_count=4, nextn_predict_layers=1, attention__indexer__types=types)  # the last guesses ahead
    assert (behind.indexer.source_layers, behind.num_hidden_layers, behind.mtp_layers) == (GLM_5, 3, 1)
    assert read(header, attention__indexer__types=None).indexer.source_layers == (0, 1, 2)  # GLM 5 and 5.1
    early = read(header, attention__indexer__types=None, context_length=1 << 20, block_count=8)
    assert early.indexer.source_layers == EARLY
    assert read(headers["deepseek_v32"]).indexer.source_layers == (0, 1, 2)


@pytest.mark.parametrize(("name", "changes", "said"), [
    ("glm_moe_dsa", {"attention__indexer__types": np.array([1, 2, 1])}, "expected 0 or 1 for each of 3 layers"),
    ("glm_moe_dsa", {"attention__indexer__types": np.array([0, 1, 1])}, "nor a first one that is shared"),
    ("glm_moe_dsa", {"attention__indexer__types": np.array([1, 1])}, "expected 0 or 1"),
    ("glm_moe_dsa", {"expert_gating_func": 1}, "expert_gating_func 1"),
    ("deepseek_v32", {"attention__indexer__top_k": None}, "lacks key deepseek32.attention.indexer.top_k"),
    ("deepseek_v32", {"attention__indexer__head_count": 0}, "deepseek32.attention.indexer.head_count"),
    ("hy_v4", {"swiglu_clamp_exp": np.float32([10, 7, 10])}, "swiglu_limit = 7.0"),
    ("hy_v4", {"hyper_connection__magnitude": 1.0}, "hy_v4.hyper_connection.magnitude = 1.0"),
    ("hy_v4", {"hyper_connection__count": None}, "lacks key hy_v4.hyper_connection.count"),
    ("deepseek_v32", {"attention__q_lora_rank": None}, "q_lora_rank None")])
def test_what_an_indexer_cannot_be_is_named(headers: dict[str, GgufHeader], name: str, changes: dict[str, object], said: str) -> None:
    with pytest.raises(EffllmError, match=said) as caught:
        read(headers[name], **changes)
    assert caught.value.hint and "\n" not in caught.value.message
