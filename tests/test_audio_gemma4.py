"""Audio and image input of Gemma 4: mel bands, rows and tokens of audio are those of transformers, and so are logits after both."""

import json

import numpy as np
import pytest
import torch
from audio_models import sound
from family_models import assert_close
from omni_models import AUDIO, EXTRACTOR, IMAGE_PROCESSOR, save_gemma4, save_gemma4_unified
from safetensors.torch import load_file, save_file
from transformers import Gemma4UnifiedAudioFeatureExtractor
from vision_models import FIRST, PICTURES, Gemma4UnifiedProcessor, change_config

from effllm import UsageError
from effllm.runtime.config import read_config
from effllm.runtime.config_reader import ConfigError
from effllm.runtime.engine import open_engine
from effllm.runtime.images import ROW_PLACEHOLDER, EncodingJob, encoder_of
from effllm.runtime.images.media import check_modality, encoder_nbytes, open_media
from effllm.runtime.images.modality import AUDIO_INPUT
from effllm.runtime.images.modality import IMAGE_INPUT as SEEN
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.templates.prompt_builder import PromptBuilder
from effllm.runtime.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma")
    return folder, save_gemma4(folder)


def ears(folder):
    return encoder_of(folder, read_config(folder), AUDIO_INPUT)


def ready(samples):
    return EXTRACTOR([samples], return_tensors="pt", padding="longest", return_attention_mask=True)


def rows_of(model, samples):
    given = ready(samples)
    with torch.inference_mode():
        found = model.model.get_audio_features(given["input_features"], given["input_features_mask"])
    return found.pooler_output[found.attention_mask].numpy()


@pytest.mark.parametrize("samples", [400, 799, 960, 961, 1600, 16_000, 33_333])
def test_bands_and_rows_are_those_of_transformers(gemma, samples):
    folder, model = gemma
    own, taken = ears(folder), sound(samples / 16_000)
    given = ready(taken)
    mask = given["input_features_mask"][0]
    assert_close(own.values(taken), given["input_features"][0][mask].numpy())
    heard = own.encode(taken, EncodingJob())
    assert heard.tokens == (FIRST + 4, *(ROW_PLACEHOLDER,) * len(heard.rows), FIRST + 5) and own.token_count(samples) == len(heard.tokens)
    assert_close(heard.rows, rows_of(model, taken))


def test_a_tower_that_is_cut_off_and_looks_ahead(tmp_path):
    model = save_gemma4(tmp_path, use_clipped_linears=True, attention_context_right=3, gradient_clipping=2.0, attention_logit_cap=2.0)
    taken = sound(0.97)
    assert_close(ears(tmp_path).encode(taken, EncodingJob()).rows, rows_of(model, taken))


def logits_behind(folder, samples, points):
    """Of a text with audio and an image: logits, transformers' token ids, and the two inputs."""
    engine = list(open_engine(folder, EngineOptions(kv="32bit", device="cpu", ctx=512, strict=True, exact=True)))[-1]
    try:
        engine.media = open_media(folder, engine.config)
        heard, seen = engine.media.add(samples), engine.media.add(points)
        prompts = PromptBuilder(Tokenizer.load(folder, engine.config), media=engine.media)
        prompt = f"Once {heard.marker} was {seen.marker} a fox."
        said = [str(each) for each in prompts.encode_media(prompt, engine, lambda: False)]
        assert any("encoding the audio clip" in each for each in said) and any("encoding the image" in each for each in said)
        told = prompts.tokenize(prompt)
        ours = np.concatenate([logits.copy() for _, logits in engine.score(told)])
        assert [engine.media.is_causal(each.ids()[1]) for each in (heard, seen)] == [True, not seen.encoded.bidirectional]
    finally:
        engine.close()
    rows = [place for place, token in enumerate(told) if token >= 1 << 40]
    for place, kind in zip(rows, [AUDIO] * len(heard.encoded.rows) + [FIRST] * len(seen.encoded.rows), strict=True):
        told[place] = kind
    return ours, torch.tensor([told]), heard.encoded, seen.encoded


def test_logits_after_an_image_and_audio_are_those_of_transformers(gemma):
    folder, model = gemma
    samples, points = sound(0.8), PICTURES["square"]
    ours, told, heard, seen = logits_behind(folder, samples, points)
    picture = IMAGE_PROCESSOR(points, input_data_format="channels_last", return_tensors="pt")
    picture.pop("num_soft_tokens_per_image")
    with torch.inference_mode():
        wanted = model(input_ids=told, **ready(samples), **picture, mm_token_type_ids=(told == FIRST).long() + 3 * (told == AUDIO).long(),
                       use_cache=False).logits[0].numpy()
    assert len(heard.rows) == 20 and len(seen.rows) > 20
    assert_close(ours, wanted)


def test_the_model_without_towers_takes_audio_too(tmp_path):
    """Its image tokens attend to each other, audio tokens do not, so a pass may end among those."""
    model = save_gemma4_unified(tmp_path)
    samples, points = sound(0.81)[:12_950], PICTURES["square"]
    ours, told, heard, seen = logits_behind(tmp_path, samples, points)
    pictured = Gemma4UnifiedProcessor()
    pictured.folder = tmp_path
    given = {**Gemma4UnifiedAudioFeatureExtractor(audio_samples_per_token=64)(samples, return_tensors="pt"), **pictured(points)}
    kinds = (told == FIRST).long() + 3 * (told == AUDIO).long()
    embedded, places = model.get_input_embeddings()(told), torch.arange(told.shape[1])[None]
    mask = model.create_masks_for_generate(model.config, embedded, None, None, places, mm_token_type_ids=kinds)
    with torch.inference_mode():
        wanted = model(input_ids=told, **given, attention_mask=mask, mm_token_type_ids=kinds, use_cache=False).logits[0].numpy()
    assert len(heard.rows) == 203 and seen.bidirectional and not heard.bidirectional
    assert_close(ours, wanted)


def test_both_are_counted_and_either_may_be_away(gemma, tmp_path):
    folder, model = gemma
    config = read_config(folder)
    assert "takes images and audio too" in config.warnings[0]
    counted = encoder_nbytes(str(folder), config)
    weights = {modality: sum(4 * each.numel() for name, each in model.named_parameters() if part in name)
               for modality, part in ((SEEN, "vision"), (AUDIO_INPUT, "audio"))}
    assert [*counted] == [SEEN, AUDIO_INPUT] and all(counted[modality] > weights[modality] > 0 for modality in counted)
    for each in folder.iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    both = json.loads((folder / "processor_config.json").read_text())
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": both["image_processor"]}))
    media = open_media(tmp_path, config)
    assert [*media.encoders] == [SEEN] and "describes the audio preprocessing" in media.refused[AUDIO_INPUT].message
    change_config(tmp_path, "config.json", audio_config=None)
    media = open_media(tmp_path, config)
    assert [*media.encoders] == [SEEN] and not media.refused
    assert "takes images too" in read_config(tmp_path).warnings[0]


def test_weights_without_the_audio_encoder_take_images_and_say_so(gemma, tmp_path):
    """As a folder that was quantized before audio was supported."""
    for each in gemma[0].iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    kept = {name: each for name, each in load_file(tmp_path / "model.safetensors").items() if "audio" not in name}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    media = open_media(tmp_path, read_config(tmp_path))
    assert [*media.encoders] == [SEEN] and "has no audio tower" in media.refused[AUDIO_INPUT].message
    whole = encoder_of(gemma[0], read_config(gemma[0]), SEEN)
    assert np.array_equal(*(each.encode(PICTURES["photo"], EncodingJob()).rows for each in (media.encoders[SEEN], whole)))
    with pytest.raises(UsageError, match="has no audio tower"):
        check_modality(tmp_path, read_config(tmp_path), modality=AUDIO_INPUT)


def test_what_no_model_has_is_refused(gemma, tmp_path):
    for each in gemma[0].iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    own = json.loads((tmp_path / "processor_config.json").read_text())
    for key, value in (("preemphasis", 1.5), ("per_bin_mean", [1.0] * 16), ("max_frequency", 9000.0)):
        changed = own | {"feature_extractor": own["feature_extractor"] | {key: value}}
        (tmp_path / "processor_config.json").write_text(json.dumps(changed))
        with pytest.raises(ConfigError, match=key):
            ears(tmp_path)
    with pytest.raises(UsageError, match="are too long for this model, which takes 30 s"):
        ears(gemma[0]).token_count(480_001)
