"""Whisper: what it is given of a sound, logits behind it and what it writes are those of transformers."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from family_models import assert_close
from hearing_models import EXTRACTOR, opened, sound
from transformers import WhisperForConditionalGeneration
from whisper_models import DE, EN, START, TRANSCRIBE, TRANSLATE, UNTIMED, written_whisper

from effllm import UsageError
from effllm.runtime.answers.replies import Replies, Wish
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.events import Done
from effllm.runtime.images import Work
from effllm.runtime.images.album import album_of
from effllm.runtime.images.senses import RATE, SOUNDS
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.sampler import SamplerSettings
from effllm.runtime.sounds.transcription import conversation
from effllm.runtime.text import Tokenizer

OPTIONS = EngineOptions(kv="32bit", device="cpu", strict=True, exact=True)
GREEDY = Wish(SamplerSettings(temperature=0), max_tokens=24)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, WhisperForConditionalGeneration]:
    folder = tmp_path_factory.mktemp("whisper")
    return folder, written_whisper(folder)


def engine_of(folder: Path, **more: object) -> Engine:
    engine = list(open_engine(folder, replace(OPTIONS, **more)))[-1]
    engine.album = album_of(folder, engine.config)
    return engine


def ready(samples: np.ndarray) -> torch.Tensor:
    return EXTRACTOR(samples, sampling_rate=RATE, return_tensors="pt").input_features


@pytest.mark.parametrize("samples", [400, 7_999, 16_000])
def test_rows_are_those_of_transformers(whisper: tuple[Path, WhisperForConditionalGeneration], samples: int) -> None:
    """The silence behind a shorter sound is heard too."""
    folder, model = whisper
    taken = sound(samples / RATE)
    found = opened(folder).see(taken, Work())
    with torch.inference_mode():
        wanted = model.model.encoder(ready(taken)).last_hidden_state[0].numpy()
    assert found.word == START and len(found.tokens) == opened(folder).places(samples) == 1
    assert_close(found.rows, wanted)


def test_logits_behind_a_sound_are_those_of_transformers(whisper: tuple[Path, WhisperForConditionalGeneration]) -> None:
    folder, model = whisper
    engine = engine_of(folder)
    try:
        for seconds in (0.4, 1.0):
            samples = sound(seconds)
            list(engine.album.see([heard := engine.album.take(samples)]))
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
    """In the language that is given, or the one that it hears; with what is never written, and what no text begins with."""
    folder, model = whisper
    engine = engine_of(folder)
    try:
        replies = Replies(engine, Tokenizer.load(folder, engine.config))
        samples = sound(0.8, seed=3)
        heard, hearing = engine.album.take(samples), engine.album.sights[SOUNDS]
        messages = conversation(hearing, replies.tokenizer.added, heard.mark, language, None, translates)
        *_, done = replies.reply(messages, replace(GREEDY, translates=translates))
        assert isinstance(done, Done)
        ours = [START, *([DE, TRANSLATE if translates else TRANSCRIBE, UNTIMED] if language else []), *done.stats.token_ids]
        with torch.inference_mode():
            made = model.generate(ready(samples), language=language and "de", task="translate" if translates else "transcribe",
                                  max_new_tokens=24, do_sample=False, return_dict_in_generate=True, force_unique_generate_call=True)
        wanted = made.sequences[0].tolist()
        assert ours == wanted[: len(ours)] and len(ours) >= min(len(wanted), 24) > 8
    finally:
        engine.close()


def test_one_that_knows_english_alone(tmp_path: Path) -> None:
    model = written_whisper(tmp_path, several=False)
    engine = engine_of(tmp_path)
    try:
        replies = Replies(engine, Tokenizer.load(tmp_path, engine.config))
        samples, hearing = sound(0.8), engine.album.sights[SOUNDS]
        heard = engine.album.take(samples)
        messages = conversation(hearing, replies.tokenizer.added, heard.mark, "en")
        *_, done = replies.reply(messages, GREEDY)
        with torch.inference_mode():
            wanted = model.generate(ready(samples), max_new_tokens=24, do_sample=False, force_unique_generate_call=True)[0].tolist()
        ours = [START, *done.stats.token_ids]
        assert ours[: len(wanted)] == wanted[: len(ours)] and len(wanted) > 8
        for asked, said in (({"language": "de"}, "not trained to write 'de' down"), ({"translates": True}, "knows English alone")):
            with pytest.raises(UsageError, match=said):
                conversation(hearing, replies.tokenizer.added, heard.mark, **asked)
    finally:
        engine.close()
