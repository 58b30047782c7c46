"""The text model of Llama 3.2 Vision in GGUF files, with the keys and tensor names of Ollama's converter."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from family_models import assert_close
from mllama_models import TEXT, mllama, wanted
from mmproj_files import add_key
from safetensors.torch import load_file

from effllm import EffllmError, UsageError
from effllm.runtime.config import read_config
from effllm.runtime.engine import open_engine
from effllm.runtime.images.media import check_modality, open_media
from effllm.runtime.images.modality import IMAGE_INPUT
from effllm.runtime.prepare import EngineOptions

NAMES = (("lm_head", "output"), ("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("model.layers", "blk"),
         ("input_layernorm", "attn_norm"), ("self_attn.o_proj", "attn_output"), ("self_attn.", "attn_"), ("post_attention_layernorm",
         "ffn_norm"), ("mlp.gate_proj", "ffn_gate"), ("mlp.down_proj", "ffn_down"), ("mlp.up_proj", "ffn_up"),
         ("cross_attn.", "cross_attn_"))
KEYS = {"block_count": 6, "context_length": 512, "embedding_length": 64, "feed_forward_length": 64, "attention.head_count": 4,
        "attention.head_count_kv": 2, "rope.dimension_count": 16, "rope.freq_base": 500_000.0, "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": 4096, "attention.cross_attention_layers": np.array(TEXT["cross_attention_layers"], np.int32)}


def file_of(folder: Path, path: Path, **changes: object) -> Path:
    """Of a folder; `changes`: keys after the architecture's name, None omits one. The vision encoder is in it, under its own names."""
    writer = gguf.GGUFWriter(path, "mllama")
    for key, value in {**KEYS, **changes}.items():
        if value is not None:
            add_key(writer, f"mllama.{key}", value)
    add_key(writer, "mllama.vision.block_count", 3)
    for number, (name, tensor) in enumerate(load_file(folder / "model.safetensors").items()):
        own, values = name.replace("language_model.", ""), tensor.float().numpy()
        if "vision" in own or "projector" in own:
            writer.add_tensor(f"v.{number}.weight", values)
            continue
        for old, new in NAMES:
            own = own.replace(old, new)
        for part, heads in (("attn_q_proj.weight", 4), ("attn_k_proj.weight", 2)):
            if own.endswith(part):  # neighbours turn together there
                values = np.ascontiguousarray(values.reshape(heads, 2, 8, -1).swapaxes(1, 2)).reshape(values.shape)
        own = own.replace(".attn_q_proj", ".attn_q").replace(".attn_k_proj", ".attn_k").replace(".attn_v_proj", ".attn_v")
        writer.add_tensor(own, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, object]:
    folder = tmp_path_factory.mktemp("mllama")
    return folder, mllama(folder)


def test_a_text_is_read_as_by_transformers(made, tmp_path: Path) -> None:
    path = file_of(made[0], tmp_path / "model.gguf")
    config = read_config(path)
    assert config.cross_attention_layers == tuple(TEXT["cross_attention_layers"])
    assert config.vocab_size == 4096 and config.extra_embeddings == 8
    assert any("for images or audio, which are ignored" in each for each in config.warnings)
    engine = list(open_engine(path, EngineOptions(kv="32bit", device="cpu", ctx=512, exact=True, spec="off")))[-1]
    ids = list(range(5, 60))
    ours = np.concatenate([logits.copy() for _, logits in engine.score(ids)])
    engine.close()
    assert_close(ours, wanted(made[1], ids, ()))


@pytest.mark.parametrize("beside", [None, "mmproj.gguf"])
def test_its_images_are_refused_and_its_texts_are_not(made, tmp_path: Path, beside: str | None) -> None:
    """Whatever lies beside it, as in Ollama's library."""
    path = file_of(made[0], tmp_path / "model.gguf")
    media = open_media(path, read_config(path), None if beside is None else str(tmp_path / beside))
    assert not media.encoders and "is read from a folder" in media.refused[IMAGE_INPUT].message
    with pytest.raises(UsageError, match="supports only text") as caught:
        check_modality(path, read_config(path))
    assert "the original checkpoint" in caught.value.hint


@pytest.mark.parametrize(("changes", "says"), [
    ({"attention.cross_attention_layers": None}, "lacks key mllama.attention.cross_attention_layers"),
    ({"attention.cross_attention_layers": 3}, "expected layer indices"),
    ({"attention.cross_attention_layers": np.array([0, 6], np.int32)}, "cross_attention_layers")])
def test_a_file_that_does_not_say_its_layers_is_refused(made, tmp_path: Path, changes: dict, says: str) -> None:
    with pytest.raises(EffllmError, match=says):
        read_config(file_of(made[0], tmp_path / "model.gguf", **changes))
