"""Whisper: input features, logits and transcriptions are those of transformers."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from audio_models import EXTRACTOR, open_encoder, sound
from family_models import assert_close
from transformers import WhisperForConditionalGeneration
from whisper_models import DE, EN, START, TRANSCRIBE, TRANSLATE, UNTIMED, save_whisper

from effllm import EffllmError, UsageError
from effllm.quant.kv import codec
from effllm.runtime.audio.transcription import transcription_messages
from effllm.runtime.config import parse_config
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.events import Done
from effllm.runtime.generation.served_model import GenerationOptions, ServedModel
from effllm.runtime.images import EncodingJob
from effllm.runtime.images.media import open_media
from effllm.runtime.images.modality import AUDIO_INPUT, SAMPLE_RATE
from effllm.runtime.kv.cross_attention_cache import cross_attention_nbytes
from effllm.runtime.planning import settings_fit
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.sampler import SamplerSettings
from effllm.runtime.tokenizer import Tokenizer

# As published, of large v3.
PUBLISHED = {
    "activation_dropout": 0.0, "activation_function": "gelu", "apply_spec_augment": False, "architectures": [
        "WhisperForConditionalGeneration"], "attention_dropout": 0.0, "begin_suppress_tokens": [220, 50257], "bos_token_id": 50257,
    "classifier_proj_size": 256, "d_model": 1280, "decoder_attention_heads": 20, "decoder_ffn_dim": 5120, "decoder_layerdrop": 0.0,
    "decoder_layers": 32, "decoder_start_token_id": 50258, "dropout": 0.0, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120,
    "encoder_layerdrop": 0.0, "encoder_layers": 32, "eos_token_id": 50257, "forced_decoder_ids": [[1, 50259], [2, 50360]], "init_std": 0.02,
    "is_encoder_decoder": True, "mask_feature_length": 10, "mask_feature_min_masks": 0, "mask_feature_prob": 0.0, "mask_time_length": 10,
    "mask_time_min_masks": 2, "mask_time_prob": 0.05, "max_length": 448, "max_source_positions": 1500, "max_target_positions": 448,
    "median_filter_width": 7, "model_type": "whisper", "num_hidden_layers": 32, "num_mel_bins": 128, "pad_token_id": 50256,
    "scale_embedding": False, "torch_dtype": "float16", "use_cache": True, "use_weighted_layer_sum": False, "vocab_size": 51866}
OPTIONS = EngineOptions(kv="32bit", device="cpu", strict=True, exact=True)
GREEDY = GenerationOptions(SamplerSettings(temperature=0), max_tokens=24)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, WhisperForConditionalGeneration]:
    folder = tmp_path_factory.mktemp("whisper")
    return folder, save_whisper(folder)


def engine_of(folder: Path, **more: object) -> Engine:
    engine = list(open_engine(folder, replace(OPTIONS, **more)))[-1]
    engine.media = open_media(folder, engine.config)
    return engine


def ready(samples: np.ndarray) -> torch.Tensor:
    return EXTRACTOR(samples, sampling_rate=SAMPLE_RATE, return_tensors="pt").input_features


def test_the_published_config_is_read() -> None:
    made = parse_config(PUBLISHED, strict=True)
    assert (made.family, made.num_hidden_layers, made.max_position_embeddings, made.intermediate_size) == ("whisper", 64, 448, 5120)
    assert made.cross_attention_layers == tuple(range(1, 64, 2)) and made.tie_word_embeddings and made.eos_token_ids == (50257,)
    with pytest.raises(EffllmError, match="decoder_layers"):
        parse_config({**PUBLISHED, "decoder_layers": 0})


@pytest.mark.parametrize("samples", [400, 7_999, 16_000])
def test_rows_are_those_of_transformers(whisper: tuple[Path, WhisperForConditionalGeneration], samples: int) -> None:
    """The silence after shorter audio is encoded too."""
    folder, model = whisper
    taken = sound(samples / SAMPLE_RATE)
    found = open_encoder(folder).encode(taken, EncodingJob())
    with torch.inference_mode():
        wanted = model.model.encoder(ready(taken)).last_hidden_state[0].numpy()
    assert found.placeholder_id == START and len(found.tokens) == open_encoder(folder).token_count(samples) == 1
    assert_close(found.rows, wanted)


def test_logits_after_audio_are_those_of_transformers(whisper: tuple[Path, WhisperForConditionalGeneration]) -> None:
    folder, model = whisper
    engine = engine_of(folder)
    try:
        for seconds in (0.4, 1.0):
            samples = sound(seconds)
            list(engine.media.encode([heard := engine.media.add(samples)]))
            engine.reset()
            ids = [*heard.ids(), EN, TRANSCRIBE, UNTIMED, *range(40, 80)]
            ours = np.concatenate([logits.copy() for _, logits in engine.score(ids)])
            with torch.inference_mode():
                told = torch.tensor([[START, *ids[1:]]])
                wanted = model(input_features=ready(samples), decoder_input_ids=told, use_cache=False).logits[0].numpy()
            assert_close(ours, wanted)
    finally:
        engine.close()


@pytest.mark.parametrize(("language", "translates"), [(None, False), ("de", False), ("German", True), (None, True)])
def test_what_it_writes_is_what_transformers_writes(whisper: tuple[Path, WhisperForConditionalGeneration], language: str | None,
                                                    translates: bool) -> None:
    """In the given language, or the detected one; with suppressed tokens, also those suppressed at the start."""
    folder, model = whisper
    engine = engine_of(folder)
    try:
        replies = ServedModel(engine, Tokenizer.load(folder, engine.config))
        samples = sound(0.8, seed=3)
        heard, hearing = engine.media.add(samples), engine.media.encoders[AUDIO_INPUT]
        messages = transcription_messages(hearing, replies.tokenizer.added, heard.marker, language, None, translates)
        *_, done = replies.reply(messages, replace(GREEDY, translate=translates))
        assert isinstance(done, Done)
        ours = [START, *([DE, TRANSLATE if translates else TRANSCRIBE, UNTIMED] if language else []), *done.stats.token_ids]
        with torch.inference_mode():
            made = model.generate(ready(samples), language=language and "de", task="translate" if translates else "transcribe",
                                  max_new_tokens=24, do_sample=False, return_dict_in_generate=True, force_unique_generate_call=True)
        wanted = made.sequences[0].tolist()
        assert ours == wanted[: len(ours)] and len(ours) >= min(len(wanted), 24) > 8
    finally:
        engine.close()


def test_its_layers_run_on_the_cpu(whisper: tuple[Path, WhisperForConditionalGeneration], tmp_path: Path,
                                   monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = whisper
    for asked, flag in (({"device": "cuda"}, "--device cuda"), ({"gpu_layers": 2}, "-ngl 2"), ({"vram": "1G"}, "--vram")):
        with pytest.raises(UsageError, match=f"{flag}: this model's cross-attention to audio runs on the CPU only"):
            prepare(folder, EngineOptions(**asked))
    (driver := tmp_path / "driver").touch()
    monkeypatch.setattr(settings_fit, "DRIVER", driver)
    placed = prepare(folder, EngineOptions(device="cuda", from_settings=frozenset({"device"})))
    assert {*placed.placement.devices} == {"cpu"} and any("ignored, since it is a setting" in said for said in placed.notices)
    assert any(said.startswith("the GPU is not used") for said in prepare(folder, EngineOptions()).notices)


def test_a_plan_counts_the_keys_of_two_audio_inputs(whisper: tuple[Path, WhisperForConditionalGeneration]) -> None:
    folder, _ = whisper
    keys = 2 * 24 * 128 * 2 * 48 * 4  # layers, pages, tokens, sides, numbers of all heads, bytes
    plan = prepare(folder, replace(OPTIONS, encoder_path=str(folder)))
    each = cross_attention_nbytes(plan.config, codec("32bit"), 1)
    assert keys <= each < 1.2 * keys and plan.media_nbytes == {AUDIO_INPUT: open_encoder(folder).bytes_needed() + each}
    plan.store.close()


def test_one_that_knows_english_alone(tmp_path: Path) -> None:
    model = save_whisper(tmp_path, is_multilingual=False)
    engine = engine_of(tmp_path)
    try:
        replies = ServedModel(engine, Tokenizer.load(tmp_path, engine.config))
        samples, hearing = sound(0.8), engine.media.encoders[AUDIO_INPUT]
        heard = engine.media.add(samples)
        messages = transcription_messages(hearing, replies.tokenizer.added, heard.marker, "en")
        *_, done = replies.reply(messages, GREEDY)
        with torch.inference_mode():
            wanted = model.generate(ready(samples), max_new_tokens=24, do_sample=False, force_unique_generate_call=True)[0].tolist()
        ours = [START, *done.stats.token_ids]
        assert ours[: len(wanted)] == wanted[: len(ours)] and len(wanted) > 8
        for asked, said in (({"language": "de"}, "not trained to transcribe 'de'"), ({"translates": True}, "knows only English")):
            with pytest.raises(UsageError, match=said):
                transcription_messages(hearing, replies.tokenizer.added, heard.marker, **asked)
    finally:
        engine.close()
