"""Text models of Nemotron vision models: configs as published and as transformers writes them; tensors of no use to text are neither read
nor reported missing."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from config_samples import SMALL, refused
from conversions import contents, options, run
from export_models import SIZES
from family_models import CASES
from safetensors.torch import save_file
from saved_models import saved
from saved_tokenizers import with_words_of_fable
from transformers import AutoConfig

from effllm.runtime.config import parse_config, read_config
from effllm.runtime.files.model_folder_files import TOWER
from effllm.runtime.gguf.export import export_gguf
from effllm.runtime.images import input_modalities
from effllm.runtime.source import open_store
from effllm.runtime.stores.composite import text_model_config
from effllm.runtime.stores.unused_tensors import unused_tensors
from effllm.runtime.tensors import check_tensors

NEMOTRON = {"model_type": "NemotronH_Nano_Omni_Reasoning_V3", "architectures": ["NemotronH_Nano_Omni_Reasoning_V3"], "auto_map": {
    "AutoConfig": "configuration.NemotronH_Nano_Omni_Reasoning_V3_Config"}, "downsample_ratio": 0.5, "force_image_size": 512,
    "img_context_token_id": 18, "img_context_token": "<image>", "projector_hidden_size": 20480, "ps_version": "v2", "sound_config": {},
    "sound_context_token_id": 27, "template": "nemotron", "torch_dtype": "bfloat16", "video_pruning_rate": 0.7, "vision_config": {},
    "vit_hidden_size": 1280, "llm_config": {
        **SMALL, "model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "MEM*EM",
        "num_hidden_layers": 6, "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"}, "head_dim": 128}}
OWN = "nemotron_h_omni, bfloat16"


def theirs(kind: str, **text: object) -> dict[str, object]:
    """What transformers writes for a vision-language model."""
    more = {"vision_config": {"model_type": "radio", "video_temporal_patch_size": 2}} if kind == "nemotron_h_omni" else {}
    return json.loads(AutoConfig.for_model(kind, text_config=text, **more).to_json_string())


def test_nemotron_as_it_is_published_is_what_transformers_makes_of_it() -> None:
    config = parse_config(NEMOTRON, strict=True)
    assert config.family == "nemotron_h" and config.num_hidden_layers == 4 and not config.tie_word_embeddings
    assert input_modalities(NEMOTRON) == "images and audio" and "takes images and audio too" in config.warnings[0]
    inner = {key: value for key, value in NEMOTRON["llm_config"].items() if key not in ("auto_map", "num_hidden_layers", "architectures")}
    pattern = inner.pop("hybrid_override_pattern")
    names = {"M": "mamba", "E": "moe", "*": "attention"}
    own = theirs("nemotron_h_omni", **inner, layers_block_type=[names[each] for each in pattern])
    newer = parse_config(own, strict=True)
    assert replace(newer, warnings=(), dtype="bfloat16") == replace(config, warnings=())
    plain = parse_config({**NEMOTRON["llm_config"], "torch_dtype": "bfloat16"}, strict=True)
    assert replace(plain, warnings=()) == replace(config, warnings=())
    refused({**NEMOTRON, "llm_config": {**NEMOTRON["llm_config"], "model_type": "llama"}}, "llama", "nemotron_h")
    refused({**NEMOTRON, "architectures": ["NemotronHForSequenceClassification"]}, "architectures")


@pytest.mark.slow
def test_a_text_part_is_the_model_that_it_would_be_alone(tmp_path: Path) -> None:
    """Quantized and exported, byte for byte; no tensor of the other parts is reported missing."""
    case = CASES[OWN]
    saved(replace(case, changes={**case.changes, "vocab_size": SIZES["vocab_size"]}), source := tmp_path / "seeing")
    config = read_config(source)
    alone = tmp_path / "alone"
    alone.mkdir()
    raw = text_model_config(json.loads((source / "config.json").read_text()))
    (alone / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if key != "architectures"}))
    with open_store(source) as store:
        read = [each.info for roles in check_tensors(config, store).values() for each in roles.values()]
        assert unused_tensors(config, store, read) == ()
        made = {}
        for info in {info.name: info for info in read}.values():
            kind = {"F32": torch.float32, "BF16": torch.bfloat16}[info.dtype]
            made[info.name] = torch.from_numpy(store.read(info).reshape(-1).copy()).view(kind).reshape(info.shape)
    save_file(made, alone / "model.safetensors")
    assert replace(read_config(alone), warnings=()) == replace(config, warnings=())
    for folder in (source, alone):
        with_words_of_fable(folder)
        run(folder, tmp_path / f"{folder.name}-4bit", options("4bit"))
        list(export_gguf(folder, tmp_path / f"{folder.name}.gguf", "Q8_0", "a name"))
    ours, expected = (contents(tmp_path / f"{folder}-4bit") for folder in ("seeing", "alone"))
    assert ours.pop(TOWER)  # what sees lies beside the text model
    assert {file: blob for file, blob in ours.items() if file.endswith(".safetensors")} == {
        file: blob for file, blob in expected.items() if file.endswith(".safetensors")}
    assert (tmp_path / "seeing.gguf").read_bytes() == (tmp_path / "alone.gguf").read_bytes()
