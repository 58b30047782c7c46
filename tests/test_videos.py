"""Videos: which frames of a file are sampled, invalid files, and what users and clients see of them."""

import os
import sys
from pathlib import Path

import numpy as np
import pexpect
import pytest
from command_line import CliRun
from hypothesis import given
from hypothesis import strategies as st
from patch_encoder import __file__ as PROGRAM
from patch_encoder import patch_sights_of
from video_files import as_sound, as_video, gray
from vision_language_models import folder

from effllm import UsageError
from effllm.cli.server.media import in_chat
from effllm.runtime.images import image_file, video_file
from effllm.runtime.images import media as albums
from effllm.runtime.images.video_file import MOST_POINTS, decode_video, read_video

__all__ = ["folder"]  # a fixture

TEN = as_video(10)
GREEDY = ("--temp", "0", "-n", "8", "--ignore-eos", "-c", "512")


@pytest.mark.parametrize(("container", "codec"), [("mp4", "mpeg4"), ("webm", "libvpx-vp9"), ("matroska", "libx264"), ("avi", "mpeg4"),
                                                  ("flv", "flv1")])
def test_moments_are_spread_evenly_and_each_is_what_is_seen_then(container, codec):
    for frames, seconds in ((4, [0, 2.5, 5, 7.5]), (16, [number * 10 / 11 for number in range(11)]), (1, [0])):
        found = decode_video(as_video(10, container, codec), "it", frames)
        assert len(found) == len(seconds) and np.allclose([each.second for each in found], seconds, atol=0.1 + 1e-3)
        assert all(abs(float(each.pixels.mean()) - gray(each.second + 1e-3)) < 4 for each in found)
        assert all(each.pixels.dtype == np.uint8 and each.pixels.shape == (48, 64, 3) for each in found)


def test_a_stream_whose_seconds_begin_elsewhere_is_told_by_its_own():
    found = decode_video(as_video(8, "mpegts", "mpeg2video", rate=25), "it", 4)
    assert 2 <= len(found) <= 4 and 0 <= found[0].second < 2.5 and found[-1].second < 8
    assert all(abs(float(each.pixels.mean()) - gray(each.second + 1e-3)) < 4 for each in found)


@pytest.mark.parametrize(("frames", "seconds"), [(16, [*range(9)]), (4, [0, 2, 5, 8]), (2, [0, 8])])
def test_without_a_stated_length_they_are_spread_as_well(frames, seconds):
    """As a browser writes what it records."""
    data = as_video(9, "webm", "libvpx-vp9", live="1")
    found = decode_video(data, "it", frames)
    assert len(found) == len(seconds) and np.allclose([each.second for each in found], seconds, atol=1.1)
    assert all(abs(float(each.pixels.mean()) - gray(each.second + 1e-3)) < 4 for each in found)


def test_their_points_are_bounded_together_and_turned_as_they_were_taken():
    wide = as_video(2, size=(1280, 720))
    assert [each.pixels.shape for each in decode_video(wide, "it", 1)] == [(720, 1280, 3)]
    many = decode_video(as_video(20, size=(1280, 720), rate=1), "it")
    assert len(many) == 16 and sum(each.pixels[..., 0].size for each in many) <= MOST_POINTS
    height, width = many[0].pixels.shape[:2]
    assert abs(width / height - 16 / 9) < 0.01 and width * height > 0.97 * MOST_POINTS / 16
    assert decode_video(as_video(1, turned=90), "it", 1)[0].pixels.shape == (64, 48, 3)


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n"
LISTED = b"ffconcat version 1.0\nfile /etc/passwd\n"


def test_an_invalid_video_is_reported(tmp_path, monkeypatch):
    for data, said in ((b"hello", "not a readable video"), (b"", "not a readable video"),
                       (as_sound(), "has no video track"),
                       (TEN[:40], "not a readable video"), (PLAYLIST, "not a readable video"),
                       (LISTED, "not a readable video")):
        with pytest.raises(UsageError, match=said) as raised:
            decode_video(data, "it")
        assert raised.value.hint
    with pytest.raises(UsageError, match="No such file"):
        read_video(tmp_path / "absent.mp4")
    with pytest.raises(UsageError, match="Is a directory"):
        read_video(tmp_path)
    whole = tmp_path / "it.mp4"
    whole.write_bytes(TEN)
    assert len(read_video(whole)) == 11
    with monkeypatch.context() as patched, pytest.raises(UsageError, match="the limit for videos"):
        patched.setattr(video_file, "MOST_BYTES", 100)
        read_video(whole)
    with monkeypatch.context() as patched, pytest.raises(UsageError, match="64 × 48 pixels"):
        patched.setattr(image_file, "MOST_POINTS", 1000)
        read_video(whole)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UsageError, match="not installed") as raised:
        read_video(whole)
    assert 'pip install "effllm[video]"' in raised.value.hint


@given(st.integers(0, len(TEN) - 1), st.binary(max_size=12), st.booleans())
def test_broken_files_are_seen_as_far_as_they_go_or_refused_in_one_line(at, noise, cut):
    data = TEN[:at] + noise + (b"" if cut else TEN[at + len(noise) :])
    try:
        found = decode_video(data, "it", 3)
    except UsageError as error:
        assert error.message.startswith("it ") and error.hint and "\n" not in error.message
    else:
        assert 1 <= len(found) <= 3 and all(each.pixels.ndim == 3 and each.second >= 0 for each in found)


# -- a user ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def clip(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(albums, "encoders_of", patch_sights_of)
    made = tmp_path / "clip.mp4"
    made.write_bytes(as_video(4))
    return made


def test_an_answer_is_about_the_moments_of_a_video(folder, clip):
    prompts = {}
    for frames in (1, 2, 4):
        ran = CliRun("run", str(folder), "Who?", "--video", str(clip), "--frames", str(frames), "--stats", *GREEDY)
        assert ran.code == 0 and "image of 64 × 48: 16 tokens" in ran.err
        prompts[frames] = int(ran.err.partition("prompt ")[2].split()[0])
    words = prompts[2] - prompts[1] - 16  # of the second that stands before an image
    assert 3 <= words <= 20 and abs(prompts[4] - prompts[2] - 2 * (16 + words)) <= 4


def test_unreadable_images_are_reported_before_weights_are_read(folder, clip, tmp_path):
    text = tmp_path / "text.mp4"
    text.write_text("no video")
    for argv, said in ((("fable", "Who?", "--video", str(clip)), "does not support image input"),
                       ((str(folder), "Who?", "--video", str(text)), "not a readable video"),
                       ((str(folder), "Who?", "--video", str(tmp_path / "absent.mp4")), "No such file"),
                       ((str(folder), "Who?", "--raw", "--video", str(clip)), "--video cannot be combined with --raw"),
                       ((str(folder), "Who?", "--video", str(clip), "--frames", "0"), "--frames 0 is out of range"),
                       ((str(folder), "Who?", "--frames", "4"), "--frames needs a video")):
        ran = CliRun("run", *argv)
        assert ran.code in (1, 2) and said in ran.err and not ran.out, argv
        assert len(ran.err.strip().splitlines()) == 2, "the failure and its next step"


def test_a_setting_of_frames_holds_where_there_is_a_video_alone(folder, clip, monkeypatch):
    monkeypatch.setenv("EFFLLM_FRAMES", "2")
    alone = CliRun("run", str(folder), "Who?", "--stats", *GREEDY)
    shown = CliRun("run", str(folder), "Who?", "--video", str(clip), "--stats", *GREEDY)
    assert alone.code == shown.code == 0
    typed = CliRun("run", str(folder), "Who?", "--video", str(clip), "--frames", "2", "--stats", *GREEDY)
    assert typed.out == shown.out != alone.out


def test_a_video_goes_with_the_next_message_of_a_chat(folder, clip):
    """By /video, and by the path that a terminal writes where a file is dropped on it; off takes it back."""
    line = ["-P", PROGRAM, "chat", str(folder), "--temp", "0", "-n", "8", "-c", "512"]
    terminal = pexpect.spawn(sys.executable, line, encoding="utf-8", timeout=60, echo=False, env={**os.environ, "TERM": "dumb"},
                             dimensions=(40, 200))
    try:
        terminal.expect("/help lists commands")
        goes = "tokens attached to the next message (/video off drops them)"
        for typed, said in (("/video absent.mp4", "No such file"), (f"/video {clip}", goes), ("/video off", "no files attached"),
                            (f"'{clip}'", goes),
                            ("Who?", "image of 64 × 48: 16 tokens"), ("/video", "no files attached")):
            terminal.sendline(typed)
            terminal.expect_exact(said)
        terminal.sendline("/exit")
        terminal.expect(pexpect.EOF)
    finally:
        terminal.close(force=True)


def test_a_part_of_a_request_is_a_video():
    class Message:
        role = "user"
        content = [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, {"type": "text", "text": "Who?"}]

    (sent,) = in_chat(type("Asked", (), {"messages": [Message]}))
    assert sent.is_video and sent.noun == "video" and sent.text() == "data:video/mp4;base64,AAAA" and sent.where == "messages[0].content[0]"
    sent.put("here")
    assert Message.content[0] == {"type": "text", "text": "here"}
