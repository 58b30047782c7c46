"""Models with both image and audio input, on the command line and in the API: both in one message, in order."""

import base64
import json
import os
import sys

import pexpect
import pytest
from audio_models import as_wav, sound
from command_line import CliRun
from omni_models import save_gemma4
from server_process import serving
from vision_language_models import as_png, picture

GREEDY = ("--temp", "0", "-n", "8", "--ignore-eos", "-c", "512")
WAVE, POINTS = as_wav(sound(0.8)), as_png(picture(1))
SEEN, HEARD = ({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(POINTS).decode()}"}},
               {"type": "input_audio", "input_audio": {"data": base64.b64encode(WAVE).decode(), "format": "wav"}})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("gemma4")
    save_gemma4(made)
    (made / "1.wav").write_bytes(WAVE)
    (made / "1.png").write_bytes(POINTS)
    return made


def test_an_answer_is_about_both(folder, tmp_path):
    shown, heard = ("--image", str(folder / "1.png")), ("--audio", str(folder / "1.wav"))
    ran = [CliRun("run", str(folder), "Who?", *given, *GREEDY) for given in (shown, heard, (*shown, *heard))]
    assert all(each.code == 0 for each in ran) and len({each.out for each in ran}) == 3, ran[-1].err
    assert "image of 64 × 48" in ran[2].err and "audio clip of 0.8 s: 22 tokens" in ran[2].err and " too" not in ran[2].err
    made = CliRun("quantize", str(folder), "-o", str(tmp_path / "out"), "--bits", "8")
    assert made.code == 0 and "audio too" not in made.err, made.err
    low = CliRun("run", str(tmp_path / "out"), "Who?", *shown, *heard, *GREEDY)
    assert low.code == 0 and "image of 64 × 48" in low.err and "audio clip of 0.8 s: 22 tokens" in low.err


def test_list_show_and_plan_say_both(folder, tmp_path, monkeypatch):
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    assert CliRun("alias", "both", str(folder)).code == 0
    assert any("text, image, audio" in line for line in CliRun("list").out.splitlines())
    rows = json.loads(CliRun("list", "--json").out)["models"]
    assert {row["name"]: row["input_modalities"] for row in rows}["both"] == ["text", "image", "audio"]
    shown, plan = (json.loads(CliRun(command, "both", "--json").out) for command in ("show", "plan"))
    assert shown["images"]["placeholder"] == "<|image|>" and shown["audio"]["placeholder"] == "<|audio|>"
    assert plan["media_bytes"] == shown["images"]["bytes"] + shown["audio"]["bytes"]
    for command in ("show", "plan"):
        said = CliRun(command, "both").out
        assert "the vision tower takes" in said and "the audio tower takes" in said


def test_a_request_may_hold_both_in_any_order(folder):
    fixed = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    with serving("-c", "512", model=str(folder)) as server:
        said = []
        for parts in ((SEEN, HEARD), (HEARD, SEEN), (HEARD,), (SEEN, HEARD)):
            reply = server.chat([{"role": "user", "content": [*parts, {"type": "text", "text": "Who?"}]}], **fixed)
            assert reply.status == 200, reply.body
            said.append(reply.json["choices"][0]["message"]["content"])
        assert said[0] == said[3] and len(set(said)) == 3
        assert server.request("GET", "/props").json["modalities"] == {"vision": True, "audio": True}
        assert server.request("GET", "/v1/models").json["data"][0]["capabilities"] == ["completion", "vision", "audio"]


def test_a_conversation_that_is_saved_knows_both_again(folder, tmp_path, monkeypatch):
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    given = ("--image", str(folder / "1.png"), "--audio", str(folder / "1.wav"))
    first = CliRun("run", str(folder), "Who?", *given, *GREEDY, "--session", "talk")
    again = CliRun("run", str(folder), "And?", *GREEDY, "--session", "talk")
    assert first.code == again.code == 0 and "audio clip of 0.8 s" in first.err, first.err + again.err
    assert again.out and "audio clip of" not in again.err and "image of" not in again.err
    (tmp_path / "2.png").write_bytes(as_png(picture(2)))
    another = CliRun("run", str(folder), "And here?", "--image", str(tmp_path / "2.png"), *GREEDY, "--session", "talk")
    assert another.code == 0 and another.err.count("image of") == 1, another.err


@pytest.mark.slow
def test_both_go_with_the_next_message_of_a_chat(folder, tmp_path):
    line = ["-m", "effllm", "chat", str(folder), "--temp", "0", "-n", "8", "-c", "512"]
    wave, points = (str(folder / name) for name in ("1.wav", "1.png"))
    terminal = pexpect.spawn(sys.executable, line, encoding="utf-8", timeout=60, echo=False, env={**os.environ, "TERM": "dumb"},
                             dimensions=(40, 200), cwd=tmp_path)
    try:
        terminal.expect("/help lists commands")
        for typed, said in ((f"/audio {wave}", "1.wav: 22 tokens attached to"), (f"'{points}'", "1.png: "), ("/audio off", "1.png: "),
                            (f"'{wave}'", "1.wav: 22 tokens attached to"), ("Who?", "audio clip of 0.8 s: 22 tokens"),
                            ("/image", "no files attached"),
                            ("/export said.md", "said.md")):
            terminal.sendline(typed)
            terminal.expect_exact(said)
        terminal.sendline("/exit")
        terminal.expect(pexpect.EOF)
    finally:
        terminal.close(force=True)
    assert "[image " in (said := (tmp_path / "said.md").read_text()) and said.index("[image ") < said.index("[audio clip ")
