"""Qwen3-ASR: input features, rows and logits are those of transformers, in both published layouts; its prompt is that of its training, and
its output is parsed."""

import base64
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from asr_models import EXTRACTOR, save_asr_model
from audio_models import as_wav, open_encoder, sound
from command_line import run_cli
from family_models import assert_close
from hypothesis import given
from hypothesis import strategies as st
from server_process import ServerProcess, serving
from test_serve_transcriptions import heard
from transformers import PreTrainedModel
from transformers.models.qwen3_asr.processing_qwen3_asr import LANGUAGE_CODE_TO_NAME, _parse_single_output
from vision_models import FIRST

from effllm import UsageError
from effllm.cli.server.transcription import TranscriptSerializer
from effllm.runtime.audio.chunking import AudioChunk
from effllm.runtime.audio.qwen3_asr import LANGUAGES, Qwen3Asr
from effllm.runtime.audio.transcript import Transcript
from effllm.runtime.audio.transcription import AnswerParser, transcription_messages
from effllm.runtime.config import read_config
from effllm.runtime.config_reader import ConfigError
from effllm.runtime.engine import open_engine
from effllm.runtime.events import TextDelta
from effllm.runtime.images import ROW_PLACEHOLDER, EncodingJob
from effllm.runtime.images.media import open_media
from effllm.runtime.images.modality import SAMPLE_RATE
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.templates.prompt_builder import PromptBuilder
from effllm.runtime.tokenizer import Tokenizer


@pytest.fixture(scope="module", params=[False, True], ids=["as transformers has it", "as published first"])
def asr(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("asr")
    return folder, save_asr_model(folder, request.param)


def ready(samples: np.ndarray) -> dict[str, torch.Tensor]:
    """As the processor asks its extractor."""
    made = EXTRACTOR(samples, sampling_rate=SAMPLE_RATE, padding=True, return_attention_mask=True, n_window=50)
    return {"input_features": made["input_features"], "input_features_mask": made["attention_mask"]}


@pytest.mark.parametrize("samples", [400, 4000, 8000, 8159, 8160, 15_999, 16_000, 16_640, 33_000, 64_160])
def test_bands_and_rows_are_those_of_transformers(asr: tuple[Path, PreTrainedModel], samples: int) -> None:
    """Lengths around the minimum, and the ends of a frame, a row, a chunk and a window."""
    folder, model = asr
    ears, taken = open_encoder(folder), sound(samples / SAMPLE_RATE)
    given, values = ready(taken), ears.values(taken)
    assert values.shape[0] == given["input_features_mask"].sum() == max(samples, 8000) // 160
    assert np.abs(values - given["input_features"][0].numpy().T[: len(values)]).max() < 1e-4
    found = ears.encode(taken, EncodingJob())
    with torch.inference_mode():
        wanted = model.model.get_audio_features(**given).pooler_output.numpy()
    assert found.tokens == (ROW_PLACEHOLDER,) * len(wanted) and ears.token_count(samples) == len(wanted)
    assert_close(found.rows, wanted)


def test_logits_after_audio_are_those_of_transformers(asr: tuple[Path, PreTrainedModel]) -> None:
    folder, model = asr
    engine = list(open_engine(folder, EngineOptions(kv="32bit", device="cpu", ctx=512, strict=True, exact=True)))[-1]
    try:
        engine.media = open_media(folder, engine.config)
        prompts = PromptBuilder(Tokenizer.load(folder, engine.config), media=engine.media)
        samples = sound(2.41)
        prompt = f"Once {engine.media.add(samples).marker} was a fox in the wood."
        list(prompts.encode_media(prompt, engine, lambda: False))
        ids = prompts.tokenize(prompt)
        ours = np.concatenate([logits.copy() for _, logits in engine.score(ids)])
    finally:
        engine.close()
    told = torch.tensor([[FIRST if token >= 1 << 40 else token for token in ids]])
    with torch.inference_mode():
        wanted = model(input_ids=told, **ready(samples), use_cache=False).logits[0].numpy()
    assert (told == FIRST).sum() == 32
    assert_close(ours, wanted)


def test_what_such_a_model_does_not_take_is_reported(asr: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    ears = open_encoder(asr[0])
    with pytest.raises(UsageError, match="too long for this model, which takes 1200 s"):
        ears.token_count(1200 * SAMPLE_RATE + 1)
    raw = json.loads((asr[0] / "config.json").read_text())
    aligner = {"thinker_config": {**raw.get("thinker_config", {}), "classify_num": 5000}}
    for each, said in (({"architectures": ["Qwen3ASRForTokenClassification"]}, "expected a"), (aligner, "labels the tokens of a text")):
        (tmp_path / "config.json").write_text(json.dumps({**raw, **each}))
        with pytest.raises(ConfigError, match=said):
            read_config(tmp_path)


# -- asking it ----------------------------------------------------------------------------------------------------------------------


def test_it_is_asked_as_it_was_trained() -> None:
    assert LANGUAGES == LANGUAGE_CODE_TO_NAME
    said = {"role": "user", "content": "M"}
    assert transcription_messages(Qwen3Asr, {}, "M") == [said]
    for language in ("de", "German", "DE", "de-AT"):
        assert transcription_messages(Qwen3Asr, {}, "M", language, "Fox") == [{"role": "system", "content": "Fox"}, said,
                                                                    {"role": "assistant", "content": "language German<asr_text>"}]
    with pytest.raises(UsageError, match="not trained to transcribe 'tlh'"):
        transcription_messages(Qwen3Asr, {}, "M", "tlh")
    with pytest.raises(UsageError, match="does not translate"):
        transcription_messages(Qwen3Asr, {}, "M", translates=True)


@given(st.sampled_from(["language English<asr_text>", "language None<asr_text>", "language zh\nx<asr_text>", "<asr_text>", "language ",
                        ""]),
       st.text(st.sampled_from("ab <>_tr"), max_size=12), st.lists(st.integers(0, 40), max_size=6))
def test_an_answer_is_taken_apart_wherever_its_pieces_end(begin: str, text: str, cuts: list[int]) -> None:
    answer, said, told = begin + text, AnswerParser("<asr_text>"), ""
    ends = [0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]
    for first, last in zip(ends, ends[1:], strict=False):
        told += said.add(answer[first:last])
    told += said.rest()
    wanted = _parse_single_output(answer)
    assert told.strip() == wanted["transcription"] and said.language == (wanted["language"] or "")


def test_a_run_has_no_text_besides_the_audio(asr: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    """Which the template of such models leaves out."""
    wave = tmp_path / "note.wav"
    wave.write_bytes(as_wav(sound(0.9)))
    asked = ("--audio", wave, "-n", "4", "--temp", "0", "-c", "256")
    code, out, err = run_cli("run", asr[0], "", *asked)
    assert code == 0 and out.strip() and "audio clip of 0.9 s: 12 tokens" in err, err
    code, out, err = run_cli("run", asr[0], "Who speaks?", *asked)
    assert code == 2 and "drops text next to an audio clip" in err and "without text" in err and len(err.splitlines()) <= 3
    assert run_cli("run", asr[0], "")[0] == 2


def test_a_transcript_is_told_without_what_heads_it() -> None:
    told = [TextDelta(piece, "answer") for piece in ("language Ger", "man<asr_", "text> Guten", " Tag")]
    for events, text, language in ((told, "Guten Tag", "German"), (told[:1], "language Ger", "")):
        shape = TranscriptSerializer("transcribe", Transcript([AudioChunk(sound(1.5), 0.1, 1.4)], "<asr_text>"), 1.5, "verbose_json")
        pieces = [each for event in events for each in shape.add(event)]
        assert all(each["type"] == "transcript.text.delta" for each in pieces)
        assert shape.whole_answer(SimpleNamespace(token_ids=(7,))) == {
            "task": "transcribe", "language": language, "duration": 1.5, "text": text,
            "segments": [{"id": 0, "start": 0.1, "end": 1.4, "text": text}]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    folder = tmp_path_factory.mktemp("served")
    save_asr_model(folder)
    with serving("-c", "512", "-n", "8", "--temp", "0", "--name", "ears", model=str(folder)) as server:
        yield server


@pytest.mark.slow
def test_a_server_transcribes_audio_in_the_requested_language(server: ServerProcess) -> None:
    wave = as_wav(sound(0.9))
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(wave).decode(), "format": "wav"}}
    for more, begins in (({}, []), ({"language": "de"}, [{"role": "assistant", "content": "language German<asr_text>"}])):
        said = server.chat([{"role": "user", "content": [part]}, *begins], max_tokens=8).json
        reply = heard(server, file=wave, **more).json
        assert reply["text"] == said["choices"][0]["message"]["content"].strip() != ""
        assert reply["usage"]["input_tokens"] == said["usage"]["prompt_tokens"]
        *pieces, last = heard(server, file=wave, stream="true", **more).events
        assert "".join(piece["delta"] for piece in pieces).rstrip() == last["text"] == reply["text"]
    assert heard(server, file=wave, prompt="Fox").json["usage"]["input_tokens"] > heard(server, file=wave).json["usage"]["input_tokens"]
    for path, more, param, told in (("/v1/audio/transcriptions", {"language": "tlh"}, "language", "not trained"),
                                    ("/v1/audio/translations", {}, "model", "does not translate")):
        refused = heard(server, path, file=wave, **more)
        assert refused.status == 400 and refused.error["param"] == param and told in refused.error["message"]
