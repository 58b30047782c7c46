"""Audio input of Nemotron 3 Nano Omni: mel bands and rows are those of transformers, and so are the logits."""

import json
import shutil
from copy import deepcopy

import numpy as np
import pytest
import torch
from audio_models import as_wav, sound
from command_line import CliRun
from family_models import assert_close
from omni_models import TEMPLATE
from remapped_checkpoints import as_nemotron_omni
from safetensors.torch import load_file, save_file
from transformers import ParakeetFeatureExtractor
from vision_cases import CASES
from vision_language_models import as_png, picture
from vision_models import FIRST, PICTURES, change_config, save_random_model

from effllm import EffllmError, UsageError
from effllm.runtime.config import read_config
from effllm.runtime.engine import open_engine
from effllm.runtime.images import EncodingJob, encoder_of, encoders_of
from effllm.runtime.images.media import open_media
from effllm.runtime.images.modality import AUDIO_INPUT, SAMPLE_RATE
from effllm.runtime.images.modality import IMAGE_INPUT as SEEN
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.templates.prompt_builder import PromptBuilder
from effllm.runtime.tokenizer import Tokenizer

FAMILY = "nemotron_h_omni"
AUDIO = FIRST + 3
EARS = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 72, "num_mel_bins": 16,
        "subsampling_conv_channels": 6, "conv_kernel_size": 5, "projection_hidden_size": 40, "projection_bias": False}
EXTRACTOR = ParakeetFeatureExtractor(feature_size=16)
WRITTEN = TEMPLATE.replace("'<|' + p['type'] + '|>'", "{'image': '<image>', 'audio': '<so_embedding>'}[p['type']]")


def written(folder, **own):
    """The case's vision model with an audio encoder; returns transformers' model."""
    text, vision, words, more, processor = deepcopy(CASES[FAMILY])
    model = save_random_model(FAMILY, folder, text, vision, [*words, "<so_embedding>", "<so_start>", "<so_end>"],
                              **more, audio_config={**EARS, **own}, audio_token_id=AUDIO)
    with torch.no_grad():
        for name, buffer in model.audio_tower.named_buffers():  # of norms of a batch, by what was seen in training
            if "running_" in name:
                buffer.add_(torch.rand_like(buffer))
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    said = {key: value for key, value in EXTRACTOR.to_dict().items() if isinstance(value, int | float | str | None)}
    (folder / "processor_config.json").write_text(json.dumps({"feature_extractor": said}))
    change_config(folder, "tokenizer_config.json", chat_template=WRITTEN)
    return model


@pytest.fixture(scope="module")
def omni(tmp_path_factory):
    folder = tmp_path_factory.mktemp("omni")
    return folder, written(folder)


def ears_of(folder):
    return encoder_of(folder, read_config(folder), AUDIO_INPUT)


def heard(samples):
    features = EXTRACTOR([samples], sampling_rate=SAMPLE_RATE, return_tensors="pt")
    return {"input_features": features["input_features"], "input_features_mask": features["attention_mask"]}


# About where a frame and a row end, where a last row has no frame of its own (a multiple of eight frames), and many queries.
@pytest.mark.parametrize("samples", [400, 480, 1279, 1280, 1281, 2560, 3000, 11_999, 16_000, 40_961, 192_000])
def test_bands_and_rows_are_those_of_transformers(omni, samples):
    folder, model = omni
    ears, taken = ears_of(folder), sound(samples / SAMPLE_RATE)
    given = heard(taken)
    frames, count = ears.values(taken)
    assert len(frames) == given["input_features_mask"].sum() == samples // 160
    assert_close(frames, given["input_features"][0, : len(frames)].numpy())
    with torch.inference_mode():
        wanted = model.get_audio_features(**given).pooler_output.numpy()
    seen = ears.encode(taken, EncodingJob())
    assert count == len(wanted) == len(seen.tokens) - 2 == ears.token_count(samples) - 2
    assert_close(seen.rows, wanted)


@pytest.mark.parametrize("own", [{"subsampling_factor": 4}, {"attention_bias": True, "convolution_bias": False, "scale_input": True},
                                 {"projection_bias": True, "conv_kernel_size": 9, "num_mel_bins": 16}])
def test_encoders_of_other_sizes_are_read_as_they_are(own, tmp_path):
    model, taken = written(tmp_path, **own), sound(1.31)
    with torch.inference_mode():
        wanted = model.get_audio_features(**heard(taken)).pooler_output.numpy()
    assert_close(ears_of(tmp_path).encode(taken, EncodingJob()).rows, wanted)


def test_biases_that_the_config_denies_are_ignored(omni, tmp_path):
    """As transformers passes them over, whatever is stored."""
    folder = shutil.copytree(omni[0], tmp_path / "unbiased")
    raw = json.loads((folder / "config.json").read_text())
    change_config(folder, "config.json", audio_config={**raw["audio_config"], "convolution_bias": False})
    tensors, taken = load_file(folder / "model.safetensors"), sound(0.9)
    apart = ears_of(folder).encode(taken, EncodingJob()).rows
    for name in [name for name in tensors if ".conv." in name and name.endswith("conv1.bias") or name.endswith("depthwise_conv.bias")]:
        tensors[name] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert np.array_equal(ears_of(folder).encode(taken, EncodingJob()).rows, apart)


def test_logits_after_both_are_those_of_transformers(omni):
    folder, model = omni
    engine = list(open_engine(folder, EngineOptions(kv="32bit", device="cpu", ctx=512, strict=True, exact=True)))[-1]
    try:
        engine.media = open_media(folder, engine.config)
        prompts = PromptBuilder(Tokenizer.load(folder, engine.config), media=engine.media)
        samples = sound(1.6)
        ear, eye = engine.media.add(samples), engine.media.add(PICTURES["photo"])
        for marks in ([ear.marker], [eye.marker, ear.marker]):
            engine.reset()
            prompt = f"Once {' and '.join(marks)} was a fox in the wood."
            list(prompts.encode_media(prompt, engine, lambda: False))
            told = prompts.tokenize(prompt)
            ours = np.concatenate([logits.copy() for _, logits in engine.score(told)])
            rows = [place for place, token in enumerate(told) if token >= 1 << 40]
            kinds = [FIRST] * (len(marks) == 2) * (len(rows) - len(ear.encoded.rows)) + [AUDIO] * len(ear.encoded.rows)
            for place, kind in zip(rows, kinds, strict=True):
                told[place] = kind
            looked = CASES[FAMILY][-1](PICTURES["photo"]) if len(marks) == 2 else {}
            with torch.inference_mode():
                wanted = model(input_ids=torch.tensor([told]), **heard(samples), **looked, use_cache=False).logits[0].numpy()
            assert_close(ours, wanted)
    finally:
        engine.close()


def test_the_published_folder_gives_the_same_audio_rows(omni, tmp_path):
    """It states the number of mel bands in its config alone, and has other tensor names for the tower."""
    folder, taken = shutil.copytree(omni[0], tmp_path / "published"), sound(1.2)
    as_nemotron_omni(folder)
    (folder / "processor_config.json").unlink()
    raw = json.loads((folder / "config.json").read_text())
    assert any(name.startswith("sound_encoder.encoder.") for name in load_file(folder / "model.safetensors"))
    change_config(folder, "config.json", sound_config={**raw["sound_config"], "model_type": "parakeet", "sampling_rate": SAMPLE_RATE})
    assert set(encoders_of(folder, read_config(folder, strict=True))) == {SEEN, AUDIO_INPUT}
    assert np.array_equal(ears_of(folder).encode(taken, EncodingJob()).rows, ears_of(omni[0]).encode(taken, EncodingJob()).rows)
    change_config(folder, "config.json", sound_config=None)
    assert set(encoders_of(folder, read_config(folder))) == {SEEN}


@pytest.mark.parametrize(("changes", "message"), [
    ({"subsampling_conv_stride": 1}, "subsampling_conv_stride is 1, expected 2"), ({"subsampling_factor": 6}, "subsampling_factor is 6"),
    ({"num_mel_bins": 80}, "the audio preprocessor makes frames of 16 bands, but the tower takes 80"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"conv_kernel_size": 4}, "conv_kernel_size is 4, expected an odd number"), ({"num_attention_heads": 5}, "multiple of 5 heads")])
def test_what_is_not_read_is_refused_by_name(omni, tmp_path, changes, message):
    folder = shutil.copytree(omni[0], tmp_path / "changed")
    raw = json.loads((folder / "config.json").read_text())
    change_config(folder, "config.json", audio_config={**raw["audio_config"], **changes})
    with pytest.raises(EffllmError) as caught:
        ears_of(folder)
    assert message in caught.value.message, caught.value.message


def test_a_plan_counts_weights_and_buffers_and_long_audio_is_refused(omni):
    folder, model = omni
    ears = ears_of(folder)
    assert ears.bytes_needed() > 4 * sum(each.numel() for each in model.audio_tower.parameters()) + 4 * 7500 * 48
    with pytest.raises(UsageError, match="too long for this model, which takes 600 s"):
        ears.token_count(600 * SAMPLE_RATE + 1)


def test_an_answer_is_about_both_also_of_low_bit_weights(omni, tmp_path):
    folder, image, wave = omni[0], tmp_path / "1.png", tmp_path / "1.wav"
    image.write_bytes(as_png(picture(1)))
    wave.write_bytes(as_wav(sound(0.8)))
    quantized = CliRun("quantize", str(folder), "-o", str(tmp_path / "out"), "--bits", "8")
    assert quantized.code == 0, quantized.err
    for model in (folder, tmp_path / "out"):
        ran = CliRun("run", str(model), "Who?", "--image", str(image), "--audio", str(wave), "--temp", "0", "-n", "4", "-c", "512")
        assert ran.code == 0 and "image of 64 × 48" in ran.err and "audio clip of 0.8 s: 13 tokens" in ran.err, ran.err
