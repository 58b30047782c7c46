"""Audio and image input of Qwen 2.5 Omni and 3 Omni: rows of both are those of transformers, and so are logits after both, with M-RoPE
positions in time and space."""

import numpy as np
import pytest
import torch
from audio_models import as_wav, sound
from command_line import CliRun
from family_models import assert_close
from omni_models import AUDIO, OMNI_EXTRACTOR, OMNI_IMAGE_PROCESSOR, QWEN3_OMNI_EXTRACTOR, save_qwen2_5_omni, save_qwen3_omni
from vision_language_models import as_png, picture
from vision_models import FIRST, PICTURES

from effllm import UsageError
from effllm.runtime.config import read_config
from effllm.runtime.engine import open_engine
from effllm.runtime.images import ROW_PLACEHOLDER, EncodingJob, encoder_of
from effllm.runtime.images.media import open_media
from effllm.runtime.images.modality import AUDIO_INPUT, SAMPLE_RATE
from effllm.runtime.images.modality import IMAGE_INPUT as SEEN
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.templates.prompt_builder import PromptBuilder
from effllm.runtime.tokenizer import Tokenizer


@pytest.fixture(scope="module", params=[save_qwen2_5_omni, save_qwen3_omni])
def omni(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("omni")
    return folder, request.param(folder)


def later(model):
    return "Moe" in type(model).__name__


def heard(model, samples):
    extractor, filled = (QWEN3_OMNI_EXTRACTOR, True) if later(model) else (OMNI_EXTRACTOR, "max_length")
    made = extractor(samples, sampling_rate=SAMPLE_RATE, return_tensors="pt", return_attention_mask=True, padding=filled,
                     truncation=not later(model))
    return {"input_features": made["input_features"], "feature_attention_mask": made["attention_mask"]}


def looked(points):
    return OMNI_IMAGE_PROCESSOR(points, input_data_format="channels_last", return_tensors="pt")


@pytest.mark.parametrize("samples", [400, 480, 641, 6400, 6401, 6721, 16_000, 16_640, 33_000, 64_000])
def test_rows_of_audio_are_those_of_transformers(omni, samples):
    """Lengths around the end of a frame, a row or a window, and audio as long as the model takes."""
    folder, model = omni
    ears, taken = encoder_of(folder, read_config(folder), AUDIO_INPUT), sound(samples / SAMPLE_RATE)
    found = ears.encode(taken, EncodingJob())
    with torch.inference_mode():
        wanted = model.model.get_audio_features(**heard(model, taken)).last_hidden_state.numpy()
    assert found.tokens == (ROW_PLACEHOLDER,) * len(wanted) and ears.token_count(samples) == len(wanted)
    assert_close(found.rows, wanted)
    most = 2400 if later(model) else 4
    with pytest.raises(UsageError, match=f"too long for this model, which takes {most} s"):
        ears.token_count(most * SAMPLE_RATE + 1)


@pytest.mark.parametrize("name", ["photo", "wide", "tiny"])
def test_rows_of_an_image_are_those_of_transformers(omni, name):
    folder, model = omni
    found = encoder_of(folder, read_config(folder), SEEN).encode(PICTURES[name], EncodingJob())
    ready = looked(PICTURES[name])
    with torch.inference_mode():
        made = model.model.get_image_features(**ready)
    wanted = torch.cat(list(made.pooler_output)).numpy()
    if later(model):
        assert_close(found.deepstack_rows[0], torch.cat(list(made.deepstack_features[0])).numpy())
    assert found.grid == tuple(each // 2 for each in ready["image_grid_thw"][0, 1:].tolist())
    assert_close(found.rows, wanted)


def test_logits_after_both_are_those_of_transformers(omni):
    folder, model = omni
    engine = list(open_engine(folder, EngineOptions(kv="32bit", device="cpu", ctx=512, strict=True, exact=True)))[-1]
    try:
        engine.media = open_media(folder, engine.config)
        prompts = PromptBuilder(Tokenizer.load(folder, engine.config), media=engine.media)
        for order in ((AUDIO_INPUT, SEEN, AUDIO_INPUT), (SEEN, AUDIO_INPUT), (AUDIO_INPUT,)):
            samples = [sound(0.7, seed) for seed in range(1, order.count(AUDIO_INPUT) + 1)]  # of one length, as a batch makes them
            waiting, marks, kinds = iter(samples), [], []
            for modality in order:
                given = engine.media.add(next(waiting) if modality is AUDIO_INPUT else PICTURES["photo"])
                written = engine.media.encoders[modality].placeholder_text
                marks.append(written.replace(engine.media.encoders[modality].placeholder, given.marker))
                kinds.append((given, AUDIO if modality is AUDIO_INPUT else FIRST))
            prompt = f"Once {' and '.join(marks)} was a fox."
            engine.reset()
            list(prompts.encode_media(prompt, engine, lambda: False))
            told = prompts.tokenize(prompt)
            ours = np.concatenate([logits.copy() for _, logits in engine.score(told)])
            rows = [place for place, token in enumerate(told) if token >= 1 << 40]
            for place, kind in zip(rows, [kind for given, kind in kinds for _ in given.encoded.rows], strict=True):
                told[place] = kind
            told = torch.tensor([told])
            given = {key: torch.cat([heard(model, each)[key] for each in samples]) for key in ("input_features", "feature_attention_mask")}
            with torch.inference_mode():
                wanted = model(input_ids=told, attention_mask=torch.ones_like(told), **given,
                               **(looked(PICTURES["photo"]) if SEEN in order else {}), use_cache=False).logits[0].numpy()
            assert_close(ours, wanted)
    finally:
        engine.close()


def test_an_answer_is_about_both_also_of_low_bit_weights(omni, tmp_path):
    folder, image, wave = omni[0], tmp_path / "1.png", tmp_path / "1.wav"
    image.write_bytes(as_png(picture(1)))
    wave.write_bytes(as_wav(sound(0.8)))
    made = CliRun("quantize", str(folder), "-o", str(tmp_path / "out"), "--bits", "8")
    assert made.code == 0 and "audio too" not in made.err, made.err
    for model in (folder, tmp_path / "out"):
        ran = CliRun("run", str(model), "Who?", "--image", str(image), "--audio", str(wave), "--temp", "0", "-n", "4", "-c", "512")
        assert ran.code == 0 and "image of 64 × 48" in ran.err, ran.err
        assert f"audio clip of 0.8 s: {10 if later(omni[1]) else 20} tokens" in ran.err
