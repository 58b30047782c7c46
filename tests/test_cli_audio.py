"""`effllm run --audio`, `/audio` and `input_audio` in requests: what users and clients see of audio files, and of invalid ones."""

import base64
import json
import os
import shutil
import subprocess
import sys

import pexpect
import pytest
from audio_models import as_wav, open_encoder, save_audio_model, sound
from command_line import CliRun
from server_process import serving
from vision_language_models import as_png, picture

from effllm.runtime.images import media

WAVES = [as_wav(sound(0.8, seed)) for seed in (1, 2, 3)]
DATA = [base64.b64encode(each).decode() for each in WAVES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("qwen2_audio")
    save_audio_model("qwen2_audio", made)
    return made


@pytest.fixture
def files(tmp_path):
    made = [tmp_path / f"{seed}.wav" for seed in (1, 2)]
    for path, data in zip(made, WAVES[:2], strict=True):
        path.write_bytes(data)
    return made


GREEDY = ("--temp", "0", "-n", "8", "--ignore-eos", "-c", "256")


def test_an_answer_depends_on_the_given_audio(folder, files):
    one, other = (CliRun("run", str(folder), "Who?", "--audio", str(path), *GREEDY) for path in files)
    assert one.code == other.code == 0 and one.out != other.out, one.err
    assert "audio clip of 0.8 s: 20 tokens" in one.err and "takes audio too" not in one.err
    both = CliRun("run", str(folder), "Who?", "--audio", str(files[0]), "--audio", str(files[1]), *GREEDY)
    assert both.code == 0 and both.out not in (one.out, other.out)


def test_a_list_shows_audio_support_and_omits_the_column_where_no_model_has_it(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert "input" not in CliRun("list").out.splitlines()[0]
    assert CliRun("alias", "listener", str(folder)).code == 0
    listed = CliRun("list").out.splitlines()
    assert "input" in listed[0] and {line.split()[0]: "text, audio" in line for line in listed[1:]} == {"fable": False, "listener": True}
    rows = json.loads(CliRun("list", "--json").out)["models"]
    assert {row["name"]: row["input_modalities"] for row in rows} == {"fable": ["text"], "listener": ["text", "audio"]}


def test_a_second_list_does_not_load_what_reads_towers_until_a_file_changes(folder, tmp_path, monkeypatch):
    own = shutil.copytree(folder, tmp_path / "own")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert CliRun("alias", "listener", str(own)).code == 0

    looked, look = [], media.open_media
    monkeypatch.setattr(media, "open_media", lambda model, *more: looked.append(model) or look(model, *more))

    def listed():
        looked.clear()
        return {row["name"]: row["input_modalities"] for row in json.loads(CliRun("list", "--json").out)["models"]}, looked == [own]

    hears = {"fable": ["text"], "listener": ["text", "audio"]}
    assert [listed(), listed()] == [(hears, True), (hears, False)]
    asked = ("import sys\nfrom effllm.cli.app import main\nsys.argv = ['effllm', 'list', '--json']\n"
             "try:\n    main()\nfinally:\n    print('numpy' in sys.modules, file=sys.stderr)\n")
    ran = subprocess.run([sys.executable, "-P", "-c", asked], capture_output=True, text=True, check=True)
    assert '"audio"' in ran.stdout and ran.stderr.strip() == "False"
    (noted,) = tmp_path.rglob("listed.json")
    noted.write_text(noted.read_text().replace('["audio"]', "[3]"))
    assert listed() == (hears, True), "what is damaged is looked at anew"
    os.utime(own / "config.json", ns=(1, 1))
    assert [listed(), listed()] == [(hears, True), (hears, False)]
    noted.unlink()
    noted.mkdir()  # takes no file
    assert [listed(), listed()] == [(hears, True)] * 2


def test_low_bit_weights_keep_the_published_audio_encoder(folder, files, tmp_path):
    made = CliRun("quantize", str(folder), "-o", str(tmp_path / "out"), "--bits", "8")
    assert made.code == 0 and "takes audio too" not in made.err, made.err
    samples = sound(0.8)
    assert (open_encoder(tmp_path / "out").encode(samples, _work()).rows == open_encoder(folder).encode(samples, _work()).rows).all()
    ran = CliRun("run", str(tmp_path / "out"), "Who?", "--audio", str(files[0]), *GREEDY)
    assert ran.code == 0 and "audio clip of 0.8 s: 20 tokens" in ran.err


def _work() -> object:
    from effllm.runtime.images import EncodingJob

    return EncodingJob()


def test_unreadable_audio_is_reported_before_weights_are_read(folder, files, tmp_path):
    text, image, long = tmp_path / "text.wav", tmp_path / "one.png", tmp_path / "long.wav"
    text.write_text("no sound")
    image.write_bytes(as_png(picture(1)))
    long.write_bytes(as_wav(sound(1.5)))
    for argv, said in ((("fable", "Who?", "--audio", str(files[0])), "does not support audio input"),
                       ((str(folder), "Who?", "--image", str(image)), "does not support image input"),
                       ((str(folder), "Who?", "--audio", str(text)), "not a readable audio file"),
                       ((str(folder), "Who?", "--audio", str(tmp_path / "absent.wav")), "No such file"),
                       ((str(folder), "Who?", "--image", str(image), "--audio", str(files[0])), "does not support image input"),
                       ((str(folder), "Who?", "--raw", "--audio", str(files[0])), "--audio cannot be combined with --raw"),
                       ((str(folder), "Who?", "--audio", str(long)), "1.5 s of audio are too long for this model")):
        ran = CliRun("run", *argv)
        assert ran.code in (1, 2) and said in ran.err and not ran.out, (argv, ran.err)
    ran = CliRun("chat", "fable", "--audio", str(files[0]))
    assert ran.code == 2 and "effllm run MODEL --audio FILE" in ran.err


def test_plan_and_show_state_audio_support_and_its_cost(folder):
    tower = open_encoder(folder).bytes_needed()
    shown, plan = (json.loads(CliRun(command, str(folder), "--json").out) for command in ("show", "plan"))
    assert shown["audio"] == {"placeholder": "<|AUDIO|>", "bytes": tower} and shown["images"] is None
    assert plan["media_bytes"] == tower
    for command, line in (("show", "supported, as <|AUDIO|>; the audio tower takes"), ("plan", "supported; the audio tower takes")):
        ran = CliRun(command, str(folder))
        assert ran.code == 0 and line in ran.out and "audio  " in ran.out and "takes audio too" not in ran.err
    assert json.loads(CliRun("show", "fable", "--json").out)["audio"] is None


@pytest.mark.slow
def test_audio_goes_with_the_next_message_of_a_chat(folder, files, tmp_path):
    line = ["-m", "effllm", "chat", str(folder), "--temp", "0", "-n", "8", "-c", "256"]
    terminal = pexpect.spawn(sys.executable, line, encoding="utf-8", timeout=60, echo=False, env={**os.environ, "TERM": "dumb"},
                             dimensions=(40, 200), cwd=tmp_path)
    try:
        terminal.expect("/help lists commands")
        for typed, said in (("/audio absent.wav", "No such file"), (f"/audio {files[0]}", "1.wav: 20 tokens attached to the next message"),
                            ("/audio off", "no files attached"), (f"'{files[1]}'", "2.wav: 20 tokens attached to the next message"),
                            ("/image 2.png", "does not support image input"), ("Who?", "audio clip of 0.8 s: 20 tokens"),
                            ("/audio", "no files attached"),
                            ("/export said.md", "said.md")):
            terminal.sendline(typed)
            terminal.expect_exact(said)
        terminal.sendline("/exit")
        terminal.expect(pexpect.EOF)
    finally:
        terminal.close(force=True)
    assert "[audio clip " in (tmp_path / "said.md").read_text()


def parts(*data: str, text: str = "Who?") -> list[dict]:
    sounds = ({"type": "input_audio", "input_audio": {"data": each, "format": "wav"}} for each in data)
    return [{"role": "user", "content": [*sounds, {"type": "text", "text": text}]}]


def test_a_server_takes_audio_in_requests(folder):
    fixed = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    with serving("-c", "512", "--parallel", "2", model=str(folder)) as server:
        one, other = (server.chat(parts(each), **fixed) for each in DATA[:2])
        assert one.status == other.status == 200, one.body
        answers = [each.json["choices"][0]["message"]["content"] for each in (one, other)]
        assert answers[0] != answers[1]
        long = "It is so, " * 30 + "Who?"
        first, again = (server.chat(parts(DATA[0], text=long), **fixed) for _ in range(2))
        assert first.json["choices"] == again.json["choices"]
        assert again.json["usage"]["prompt_tokens_details"]["cached_tokens"] > 60
        changed = server.chat(parts(DATA[2], text=long), **fixed)
        assert changed.json["usage"]["prompt_tokens_details"]["cached_tokens"] < 20
        url = [{"role": "user", "content": [{"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{DATA[0]}"}},
                                            {"type": "text", "text": "Who?"}]}]
        assert server.chat(url, **fixed).json["choices"][0]["message"]["content"] == answers[0]
        for content, said in (({"type": "input_audio", "input_audio": {"data": "https://example.com/a.wav"}}, "not fetched"),
                              ({"type": "input_audio", "input_audio": {"data": "?"}}, "not a base64-encoded audio clip"),
                              ({"type": "input_audio"}, "not a base64-encoded audio clip"),
                              ({"type": "input_audio", "input_audio": {"data": base64.b64encode(b"no").decode()}}, "not a readable"),
                              ({"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}, "does not support image input")):
            reply = server.chat([{"role": "user", "content": [content]}])
            assert reply.status == 400 and said in reply.error["message"] and "messages[0].content[0]" in reply.error["message"], reply.body
        props = server.request("GET", "/props").json
        assert props["modalities"] == {"vision": False, "audio": True}
        card = server.request("GET", "/v1/models").json["data"][0]
        told = server.request("POST", "/api/show", {"model": card["id"]}).json["capabilities"]
        assert card["capabilities"] == ["completion", "audio"] and "audio" in told and "vision" not in told
