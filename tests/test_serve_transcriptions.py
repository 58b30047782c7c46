"""OpenAI's transcription endpoint (multipart forms): with a tiny random model with audio input, and with one without."""

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from audio_models import as_wav, save_audio_model, sound
from hypothesis import given
from hypothesis import strategies as st
from server_process import Reply, ServerProcess, serving
from whisper_models import save_whisper

from effllm.cli.server.form_data import parts_of
from effllm.cli.server.problems import Problem
from effllm.runtime.audio.audio_tower import AudioTower
from effllm.runtime.audio.chunking import FRAME_SAMPLES, PAUSE_FRAMES, split_at_pauses
from effllm.runtime.audio.transcript import subtitles
from effllm.runtime.audio.transcription import transcription_messages
from effllm.runtime.audio.voxtral import Voxtral
from effllm.runtime.images.modality import SAMPLE_RATE

PATH, BOUNDARY = "/v1/audio/transcriptions", "a38b1f6dd4ab4bf5b3c2b4b7b7c1d4a2"
WAV = as_wav(sound(0.7))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hears")
    save_audio_model("qwen2_audio", folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with serving("-c", "512", "-n", "12", "--temp", "1", "--name", "ears", model=str(folder)) as server:
        yield server


def form(**fields: str | bytes) -> bytes:
    """As httpx writes one, which openai-python sends."""
    made = b""
    for name, value in fields.items():
        file = b'; filename="a.wav"\r\nContent-Type: audio/wav' if isinstance(value, bytes) else b""
        said = value if isinstance(value, bytes) else value.encode()
        made += f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"'.encode() + file + b"\r\n\r\n" + said + b"\r\n"
    return made + f"--{BOUNDARY}--\r\n".encode()


def heard(server: ServerProcess, path: str = PATH, **fields: str | bytes) -> Reply:
    return server.request("POST", path, form(**fields), Content_Type=f"multipart/form-data; boundary={BOUNDARY}")


def test_a_transcription_equals_that_in_a_chat(server: ServerProcess) -> None:
    reply = heard(server, file=WAV, model="ears", language="en", prompt="Fox")
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(WAV).decode(), "format": "wav"}}
    asks = "Transcribe the speech. It is in en. Words that may be in it, or what came before it: Fox"
    said = server.chat([{"role": "user", "content": [part, {"type": "text", "text": asks}]}], max_tokens=12).json
    assert reply.status == 200 and reply.json["text"] == said["choices"][0]["message"]["content"].strip() != ""
    usage = said["usage"]
    assert reply.json["usage"] == {"type": "tokens", "input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
                                   "total_tokens": usage["total_tokens"]}
    plain = heard(server, file=WAV).json["text"]
    assert heard(server, "/audio/transcriptions", file=WAV, response_format="text").body.decode() == plain + "\n"
    whole = heard(server, file=WAV, response_format="verbose_json", language="en", temperature="0.0").json
    assert whole == {"task": "transcribe", "language": "en", "duration": pytest.approx(0.7), "text": whole["text"], "segments": [
        {"id": 0, "start": 0.0, "end": 0.7, "text": whole["text"]}]}
    translated = heard(server, "/v1/audio/translations", file=WAV).json["text"]
    assert translated and translated != plain


def test_a_stream_is_the_whole_in_pieces(server: ServerProcess) -> None:
    *pieces, last = heard(server, file=WAV, stream="true").events
    whole = heard(server, file=WAV).json
    assert {piece["type"] for piece in pieces} == {"transcript.text.delta"} and last == {"type": "transcript.text.done", **whole}
    assert "".join(piece["delta"] for piece in pieces).rstrip() == whole["text"]


@pytest.mark.parametrize(("fields", "status", "param"), [
    ({"file": b"no sound"}, 400, "file"), ({"model": "ears"}, 400, "file"), ({"file": WAV, "model": "other"}, 404, "model"),
    ({"file": WAV, "response_format": "diarized_json"}, 400, "response_format"),
    ({"file": WAV, "response_format": "srt", "stream": "1"}, 400, "stream"),
    ({"file": WAV, "timestamp_granularities[]": "word"}, 400, "timestamp_granularities[]"),
    ({"file": WAV, "temperature": "hot"}, 400, "temperature"),
    ({"file": WAV, "temperature": "-1"}, 400, "temperature"), ({"file": WAV, "stream": "perhaps"}, 400, "stream")])
def test_what_is_refused_is_named(server: ServerProcess, fields: dict, status: int, param: str) -> None:
    reply = heard(server, **fields)
    assert reply.status == status and reply.error["param"] == param, reply.body


def test_times_of_words_are_refused_wherever_they_are_asked_for(server: ServerProcess) -> None:
    for grains in (("segment", "word"), ("word", "segment")):
        first, second = (form(**{"timestamp_granularities[]": each}).removesuffix(f"--{BOUNDARY}--\r\n".encode()) for each in grains)
        reply = server.request("POST", PATH, first + second + form(file=WAV, response_format="verbose_json"),
                               Content_Type=f"multipart/form-data; boundary={BOUNDARY}")
        assert reply.status == 400 and reply.error["param"] == "timestamp_granularities[]", grains


def test_an_invalid_constraint_is_reported(server: ServerProcess) -> None:
    assert server.request("POST", PATH, {"file": "x"}).status == 415
    cut = server.request("POST", PATH, form(file=WAV)[:-60], Content_Type=f"multipart/form-data; boundary={BOUNDARY}")
    assert cut.status == 400 and "complete form" in cut.error["message"]


def test_a_model_without_audio_input_says_so() -> None:
    with serving() as server:
        reply = heard(server, file=WAV)
        assert reply.status == 400 and "does not support audio input" in reply.error["message"]


def test_each_family_is_asked_in_its_own_words() -> None:
    plain = SimpleNamespace(transcription_prompt="Write.", transcribe_token="", transcript_start_token="", constrain_logits=None)
    by_token = SimpleNamespace(transcribe_token=Voxtral.transcribe_token, transcript_start_token="", constrain_logits=None)
    assert transcription_messages(plain, {}, "M", "de") == [{"role": "user", "content": "MWrite. It is in de."}]
    added = {"[TRANSCRIBE]": 34}
    assert transcription_messages(by_token, added, "M", "de", "hint") == [{"role": "user", "content": "M"},
                                                                {"role": "assistant", "content": "lang:de[TRANSCRIBE]"}]
    assert transcription_messages(by_token, added, "M")[1]["content"] == "[TRANSCRIBE]"
    assert len(transcription_messages(by_token, added, "M", translates=True)) == 1
    assert AudioTower.transcription_prompt
    assert transcription_messages(AudioTower, added, "M") == [{"role": "user", "content": "MTranscribe the speech."}]


def test_audio_is_transcribed_in_chunks_as_long_as_the_model_takes(server: ServerProcess) -> None:
    """Qwen2-Audio's here takes a second: pieces are cut where it is quiet, silence between them is left out, and times are theirs."""
    parts = [sound(0.6), np.zeros(SAMPLE_RATE, np.float32), sound(0.8, seed=2), np.zeros(SAMPLE_RATE // 2, np.float32), sound(0.5, seed=3)]
    alone = [heard(server, file=as_wav(parts[0])).json["text"], *(heard(server, file=as_wav(each)).json["text"] for each in parts[2::2])]
    assert all(alone)
    wav = as_wav(np.concatenate(parts))
    whole = heard(server, file=wav, response_format="verbose_json").json
    times = [(each["start"], each["end"]) for each in whole["segments"]]
    assert whole["duration"] == pytest.approx(3.4) and times == sorted(times) and len(times) >= 3
    assert times[0][0] == 0 and times[0][1] == pytest.approx(0.6, abs=0.03) and times[-1][1] == pytest.approx(3.4, abs=0.03)
    assert not any(start < 1.5 and end > 0.7 for start, end in times), "nothing is said in silence"
    assert whole["text"] == " ".join(each["text"] for each in whole["segments"])
    found = heard(server, file=wav).json
    assert found["text"] == whole["text"]
    *pieces, last = heard(server, file=wav, stream="true").events
    assert last == {"type": "transcript.text.done", **found} and "".join(piece["delta"] for piece in pieces) == found["text"]
    srt = heard(server, file=wav, response_format="srt").body.decode()
    first = " ".join(whole["segments"][0]["text"].split())
    assert srt.startswith(f"1\n00:00:00,000 --> 00:00:00,600\n{first}\n\n2\n") and srt.count(" --> ") == len(times)
    vtt = heard(server, file=wav, response_format="vtt").body.decode()
    assert vtt.startswith("WEBVTT\n\n1\n00:00:00.000 --> 00:00:00.600\n")


def test_several_transcriptions_run_at_once_with_cross_attention(tmp_path: Path) -> None:
    save_whisper(tmp_path)
    sounds = [as_wav(np.concatenate([sound(0.8, seed), np.zeros(SAMPLE_RATE, np.float32), sound(0.6, seed + 4)])) for seed in range(4)]
    with serving("-np", "3", "-n", "20", model=str(tmp_path)) as server, ThreadPoolExecutor(4) as pool:
        def written(wav: bytes) -> dict:
            return heard(server, file=wav, response_format="verbose_json").json

        alone = [written(wav) for wav in sounds]
        assert len({each["text"] for each in alone}) == 4 and all(each["language"] in ("English", "German") for each in alone)
        assert [*pool.map(written, sounds)] == alone
        german, english = (heard(server, path, file=sounds[0], **more).json["text"] for path, more in (
            (PATH, {"language": "de"}), ("/v1/audio/translations", {})))
        assert german and english and german != english


def test_a_model_that_writes_down_alone_has_no_system_prompt_and_ends(tmp_path: Path) -> None:
    """Its template takes no words beside an audio clip; and one that repeats itself would go on for ever where a middle may be left out."""
    save_whisper(tmp_path, max_target_positions=40)
    with serving("--system", "Be brief.", "--overflow", "shift", model=str(tmp_path)) as server:
        reply = heard(server, file=WAV)
        assert reply.status == 200 and reply.json["usage"]["output_tokens"] < 40, reply.body
        said = server.chat([{"role": "user", "content": "Hello"}])
        assert said.status == 400 and "send an audio clip with it" in said.error["message"] and "(a file)" not in said.error["message"]


def test_quiet_audio_is_chunked_like_loud_audio() -> None:
    samples = np.concatenate([sound(0.6), np.zeros(SAMPLE_RATE, np.float32), sound(0.8, seed=2)])
    times = [[(each.begin_s, each.end_s) for each in split_at_pauses(samples * np.float32(scale), 1.0)] for scale in (1.0, 5e-4)]
    assert len(times[0]) >= 2 and times[0] == times[1]


def test_a_subtitle_is_a_line() -> None:
    assert subtitles([(0, 1, "a\n\nb --> c")], False) == "1\n00:00:00,000 --> 00:00:01,000\na b --> c\n"


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3 * SAMPLE_RATE)), min_size=1, max_size=6), st.floats(0.5, 4))
def test_pieces_are_all_that_is_heard(parts: list[tuple[bool, int]], max_seconds: float) -> None:
    samples = np.concatenate([np.full(count, 0.1 if is_heard else 0.0, np.float32) for is_heard, count in parts])
    found = split_at_pauses(samples, max_seconds)
    assert found and all(len(each.samples) <= max(max_seconds * SAMPLE_RATE, PAUSE_FRAMES * FRAME_SAMPLES) for each in found)
    assert all(0 <= each.begin_s < each.end_s <= len(samples) / SAMPLE_RATE for each in found)
    assert all(before.end_s <= after.begin_s for before, after in zip(found, found[1:]))
    assert sum(np.count_nonzero(each.samples) for each in found) == np.count_nonzero(samples)


CONTENTS = st.binary(max_size=60).filter(lambda each: BOUNDARY.encode() not in each)


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,12}", fullmatch=True), CONTENTS, min_size=1, max_size=5))
def test_a_form_is_read_as_it_was_written(fields: dict[str, bytes]) -> None:
    assert parts_of(f'multipart/form-data; boundary="{BOUNDARY}"', form(**fields)) == fields


@given(st.binary(max_size=200))
def test_no_bytes_are_more_than_refused(body: bytes) -> None:
    for sent in (body, f"--{BOUNDARY}\r\n".encode() + body + f"\r\n--{BOUNDARY}--".encode()):
        try:
            assert isinstance(parts_of(f"multipart/form-data; boundary={BOUNDARY}", sent), dict)
        except Problem as problem:
            assert problem.status == 400


@pytest.mark.peer
def test_openais_client_understands_the_responses(server: ServerProcess) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        file = ("note.wav", WAV)
        whole = client.audio.transcriptions.create(model="ears", file=file, language="en", timestamp_granularities=["segment"])
        assert whole.text and whole.usage.output_tokens == 12
        *pieces, last = client.audio.transcriptions.create(model="ears", file=file, language="en", stream=True)
        assert last.text == whole.text == "".join(piece.delta for piece in pieces).rstrip()
        assert client.audio.transcriptions.create(model="ears", file=file, response_format="verbose_json").duration == pytest.approx(0.7)
        assert client.audio.translations.create(model="ears", file=file).text
