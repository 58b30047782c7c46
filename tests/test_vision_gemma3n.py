"""Image input of Gemma 3n: convolutions, attention and rows of its tower are those of transformers, whose tower is timm's, and so are
logits after an image, which ends with a token of the tower's own."""

import json

import gguf
import numpy as np
import pytest
import torch
from family_models import assert_close
from family_sizes import GEMMA_3N
from mmproj_files import add_key
from mobilenet_torch import COUNT, SIDE, WIDTH, wrapped
from omni_models import TEMPLATE
from safetensors.numpy import load_file, save_file
from test_gguf_gemma3n import converted
from transformers import Gemma3nConfig, Gemma3nForConditionalGeneration
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from vision_models import FABLE, FIRST, PICTURES, change_config, open_encoder, open_quantized_encoder

from effllm import EffllmError
from effllm.runtime.config import read_config
from effllm.runtime.engine import open_engine
from effllm.runtime.images import ROW_PLACEHOLDER, EncodingJob
from effllm.runtime.images.media import open_media
from effllm.runtime.images.modality import AUDIO_INPUT
from effllm.runtime.images.modality import IMAGE_INPUT as SEES
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.templates.prompt_builder import PromptBuilder
from effllm.runtime.tokenizer import Tokenizer

# Words of the text model and of what sees, one behind the other; an image ends with one of the latter.
SEEN, WORDS = FIRST + 4, 4
ADDED = {0: "<start_of_image>", 4: "<end_of_image>", 5: "<image_soft_token>"}
TEXT = {**GEMMA_3N, "hidden_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512,
        "vocab_size": SEEN + 2 * WORDS, "vocab_size_per_layer_input": SEEN}
EARS = {"input_feat_size": 16, "hidden_size": 48, "conf_num_hidden_layers": 1, "conf_num_attention_heads": 4,
        "sscp_conv_channel_size": [8, 6], "vocab_size": WORDS, "vocab_offset": SEEN + WORDS}
PROCESSOR = SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE}, resample=2, do_normalize=False)


def written(folder, hidden: int = 48) -> Gemma3nForConditionalGeneration:
    config = Gemma3nConfig(text_config={**TEXT, "hidden_size": hidden}, audio_config=EARS, vision_config={
        "hidden_size": WIDTH, "vocab_size": WORDS, "vocab_offset": SEEN}, vision_soft_tokens_per_image=COUNT**2, boi_token_id=FIRST,
        eoi_token_id=SEEN, image_token_id=SEEN + 1)
    torch.manual_seed(3)
    with wrapped():
        model = Gemma3nForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.15))
    model.save_pretrained(folder)
    PROCESSOR.save_pretrained(folder)
    (folder / "generation_config.json").write_text((FABLE / "generation_config.json").read_text())
    settings = json.loads((FABLE / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE.replace(
        "'<|' + p['type'] + '|>'", "'<image_soft_token>'")}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    vocabulary = json.loads((FABLE / "tokenizer.json").read_text())
    like = vocabulary["added_tokens"][-1]
    vocabulary["added_tokens"] += [{**like, "id": FIRST + at, "content": ADDED.get(at, f"<unused{at}>")} for at in range(6)]
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    return model


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma3n")
    return folder, written(folder)


def copied(folder, to):
    for each in folder.iterdir():
        (to / each.name).write_bytes(each.read_bytes())
    return to


@pytest.mark.parametrize("name", ["photo", "tall", "tiny"])
def test_values_and_rows_are_those_of_transformers(gemma, name):
    folder, model = gemma
    sight, picture = open_encoder(folder), PICTURES[name]
    ready = PROCESSOR(picture, input_data_format="channels_last", return_tensors="pt")
    assert np.array_equal(sight.values(picture).transpose(2, 0, 1), ready["pixel_values"][0].numpy())
    with torch.inference_mode():
        wanted = torch.cat([model.model.get_image_features(ready["pixel_values"]).pooler_output[0],
                            model.model.embed_vision(input_ids=torch.tensor([[SEEN]]))[0]]).numpy()
    seen = sight.encode(picture, EncodingJob())
    assert seen.rows.shape == wanted.shape and np.abs(seen.rows - wanted).max() < 2e-5 * np.abs(wanted).max()
    first = seen.tokens.index(ROW_PLACEHOLDER)
    assert seen.tokens[first - 1] == FIRST and seen.tokens[first : first + COUNT**2 + 1] == (ROW_PLACEHOLDER,) * (COUNT**2 + 1)
    assert seen.tokens.count(ROW_PLACEHOLDER) == COUNT**2 + 1 and not seen.bidirectional


def test_logits_after_an_image_are_those_of_transformers(gemma):
    folder, model = gemma
    engine = list(open_engine(folder, EngineOptions(kv="32bit", device="cpu", ctx=512, strict=True, exact=True)))[-1]
    try:
        engine.media = open_media(folder, engine.config)
        photo = engine.media.add(PICTURES["photo"])
        prompts = PromptBuilder(Tokenizer.load(folder, engine.config), media=engine.media)
        prompt = f"Once {photo.marker} was a fox."
        list(prompts.encode_media(prompt, engine, lambda: False))
        ids = prompts.tokenize(prompt)
        ours = np.concatenate([logits.copy() for _, logits in engine.score(ids)])
    finally:
        engine.close()
    rows = [place for place, token in enumerate(ids) if token >= 1 << 40]
    told = torch.tensor([[SEEN + 1 if place in rows[:-1] else SEEN if place == rows[-1] else token for place, token in enumerate(ids)]])
    ready = PROCESSOR(PICTURES["photo"], input_data_format="channels_last", return_tensors="pt")
    with torch.inference_mode():
        wanted = model(input_ids=told, pixel_values=ready["pixel_values"], use_cache=False).logits[0].numpy()
    assert_close(ours, wanted)


@pytest.mark.parametrize(("where", "changes", "said"), [
    ("vision_config", {"architecture": "resnet50"}, "architecture .resnet50. is not supported"),
    ("vision_config", {"vocab_offset": SEEN - 9}, "vocab_offset"),
    ("config.json", {"vision_soft_tokens_per_image": 5}, "vision_soft_tokens_per_image 5 is not a square"),
    ("config.json", {"vision_soft_tokens_per_image": 16}, "6 × 6 places does not divide into 4 × 4 rows"),
    ("preprocessor_config.json", {"do_resize": False}, "do_resize is False, expected true")])
def test_what_is_made_otherwise_is_refused_by_name(gemma, tmp_path, where, changes, said):
    copied(gemma[0], tmp_path)
    if where == "vision_config":
        raw = json.loads((tmp_path / "config.json").read_text())
        change_config(tmp_path, "config.json", vision_config={**raw["vision_config"], **changes})
    else:
        change_config(tmp_path, where, **changes)
    with pytest.raises(EffllmError, match=said):
        open_encoder(tmp_path).encode(PICTURES["tiny"], EncodingJob())


def test_a_tower_that_is_damaged_is_refused(gemma, tmp_path):
    path, first = copied(gemma[0], tmp_path) / "model.safetensors", "model.vision_tower.timm_model.blocks.1.0.dw_start.conv.weight"
    tensors = load_file(path)
    whole = {name: each for name, each in tensors.items() if ".blocks." not in name or ".blocks.0." in name}
    for damaged, said in (({**tensors, first: tensors[first][:, 0]}, "expected 4 sizes"), (whole, "has 1 stages")):
        save_file(damaged, path)
        with pytest.raises(EffllmError, match=said):
            open_encoder(tmp_path).encode(PICTURES["tiny"], EncodingJob())


def test_a_quantized_model_sees_the_same(tmp_path):
    written(tmp_path / "whole", hidden=64)
    open_quantized_encoder(tmp_path)


def test_a_gguf_file_sees_the_same(gemma, tmp_path):
    """The vision tower under the names of llama.cpp's converter, next to the text model's file with all tokens."""
    folder, _ = gemma
    text, said = tmp_path / "text", json.loads((folder / "config.json").read_text())
    text.mkdir()
    tensors = load_file(folder / "model.safetensors")
    (text / "config.json").write_text(json.dumps(said["text_config"] | {"vocab_size": SEEN + 2 * WORDS}))
    save_file({name.replace("language_model.", ""): values for name, values in tensors.items() if "language_model." in name},
              text / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (text / name).write_bytes((folder / name).read_bytes())
    model = converted(text, tmp_path / "gemma.gguf")
    writer = gguf.GGUFWriter(tmp_path / "mmproj-gemma.gguf", "clip")
    for key, value in {"has_vision_encoder": True, "has_audio_encoder": True, "vision.projector_type": "gemma3nv",
                       "audio.projector_type": "gemma3na", "vision.image_size": SIDE, "vision.patch_size": SIDE // COUNT**2,
                       "vision.embedding_length": WIDTH, "vision.feed_forward_length": 4 * WIDTH, "vision.block_count": 128,
                       "vision.attention.head_count": 8, "vision.attention.layer_norm_epsilon": 1e-6, "vision.image_mean": [0.0] * 3,
                       "vision.image_std": [1.0] * 3}.items():
        add_key(writer, f"clip.{key}", value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 1)
    for name, values in tensors.items():
        if not name.startswith(("model.vision_tower.", "model.embed_vision.")):
            continue
        own = name.replace("model.vision_tower.timm_model.blocks.", "v.blk.")
        own = own if own != name else names.get_name(name, (".weight", ".bias"))
        writer.add_tensor(own, values[None, :, None, None] if own == "v.conv_stem.conv.bias" else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found, wanted = open_media(model, read_config(model, strict=True)), open_encoder(folder)
    assert "gemma3na" in found.refused[AUDIO_INPUT].message
    for name in ("photo", "tall"):
        ours, theirs = found.encoders[SEES].encode(PICTURES[name], EncodingJob()), wanted.encode(PICTURES[name], EncodingJob())
        assert np.array_equal(ours.rows, theirs.rows) and ours.tokens == theirs.tokens
