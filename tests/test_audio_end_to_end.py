"""From audio samples to logits, with our encoder and text model, against transformers' feature extractor and model."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from audio_models import FAMILIES, open_encoder, processor_output, save_audio_model, sound
from family_models import assert_close
from vision_models import FIRST

from effllm import UsageError
from effllm.runtime.engine import open_engine
from effllm.runtime.images import ROW_PLACEHOLDER, EncodingJob
from effllm.runtime.images.media import open_media
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.templates.prompt_builder import PromptBuilder
from effllm.runtime.tokenizer import Tokenizer

OPTIONS = EngineOptions(kv="32bit", device="cpu", ctx=512, strict=True, exact=True)


@pytest.fixture(scope="module", params=FAMILIES)
def hearing(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, save_audio_model(request.param, folder)


def test_logits_after_audio_are_those_of_transformers(hearing):
    family, folder, model = hearing
    engine = list(open_engine(folder, OPTIONS))[-1]
    try:
        engine.media = open_media(folder, engine.config)
        prompts = PromptBuilder(Tokenizer.load(folder, engine.config), media=engine.media)
        for seconds in {"qwen2_audio": (0.73, 1.0), "granite_speech": (1.31, 2.41), "glmasr": (1.1, 2.41)}.get(family, (0.5, 2.41)):
            samples = sound(seconds)
            heard = engine.media.add(samples)
            engine.reset()
            prompt = f"Once {heard.marker} was a fox in the wood."
            list(prompts.encode_media(prompt, engine, lambda: False))
            ids = prompts.tokenize(prompt)
            ours = np.concatenate([logits.copy() for _, logits in engine.score(ids)])
            told = torch.tensor([[FIRST if token >= 1 << 40 else token for token in ids]])
            with torch.inference_mode():
                wanted = model(input_ids=told, **processor_output(family, samples), use_cache=False).logits[0].numpy()
            if family == "granite_speech":
                wanted /= model.config.text_config.logits_scaling  # which the class that hears leaves out
            assert len(heard.encoded.rows) >= 12 and (told == FIRST).sum() == len(heard.encoded.rows)
            assert_close(ours, wanted)
    finally:
        engine.close()


def test_rows_are_as_many_as_were_said_beforehand(hearing):
    """Of every length about where a frame, a row or a window ends."""
    family, folder, model = hearing
    ours = open_encoder(folder)
    for samples in (400, 481, 799, 800, 801, 1120, 15_999, 16_000, *(() if family == "qwen2_audio" else (16_001, 16_641, 33_000))):
        seen = ours.encode(sound(samples / 16_000), EncodingJob())
        assert len(seen.tokens) == ours.token_count(samples) == len(seen.rows) and set(seen.tokens) <= {ROW_PLACEHOLDER}
        assert seen.rows.dtype == np.float32 and np.isfinite(seen.rows).all()


def test_a_sound_that_is_too_long_for_the_model_is_told(hearing):
    _, folder, _ = hearing
    ours = open_encoder(folder)
    with pytest.raises(UsageError, match="are too long for this model, which takes"):
        ours.token_count(int(ours.max_seconds * 16_000) + 1)


def test_a_plan_has_room_for_weights_and_work(hearing):
    _, folder, model = hearing
    tower = sum(each.numel() * 4 for name, each in model.named_parameters() if re.search("audio_tower|projector|encoder", name))
    assert open_encoder(folder).bytes_needed() > tower + 4 * 50 * 48 * 6


def test_audio_input_trained_as_an_adapter_requires_the_adapter(tmp_path):
    """It lies in the model's folder; what comes of both is what comes of weights into which it is merged."""
    from safetensors.numpy import save_file

    model = save_audio_model("granite_speech", tmp_path, has_lora_adapter=True)
    rng, thin = np.random.default_rng(3), {}
    for number, layer in enumerate(model.model.language_model.layers):
        for name in ("q_proj", "v_proj"):
            weight = getattr(layer.self_attn, name).weight
            a, b = (rng.normal(0, 0.3, shape).astype(np.float32) for shape in ((4, weight.shape[1]), (weight.shape[0], 4)))
            own = f"base_model.model.language_model.model.layers.{number}.self_attn.{name}"
            thin |= {f"{own}.lora_A.weight": a, f"{own}.lora_B.weight": b}
            weight.data += 2 * torch.from_numpy(b @ a)
    save_file(thin, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8,
                                                              "target_modules": ["q_proj", "v_proj"]}))
    samples = sound(1.31)
    for options in (OPTIONS, replace(OPTIONS, lora=(str(tmp_path),))):
        engine = list(open_engine(tmp_path, options))[-1]
        try:
            engine.media = open_media(tmp_path, engine.config)
            prompts = PromptBuilder(Tokenizer.load(tmp_path, engine.config), media=engine.media)
            prompt = f"Once {engine.media.add(samples).marker} was a fox."
            list(prompts.encode_media(prompt, engine, lambda: False))
            ids = prompts.tokenize(prompt)
            if not options.lora:
                with pytest.raises(UsageError, match="needs its published LoRA adapter") as refused:
                    list(engine.score(ids))
                assert refused.value.hint.startswith("use --lora FOLDER")
                continue
            ours = np.concatenate([logits.copy() for _, logits in engine.score(ids)])
        finally:
            engine.close()
    told = torch.tensor([[FIRST if token >= 1 << 40 else token for token in ids]])
    with torch.inference_mode():
        wanted = model(input_ids=told, **processor_output("granite_speech", samples), use_cache=False).logits[0].numpy()
    assert_close(ours, wanted / model.config.text_config.logits_scaling)
