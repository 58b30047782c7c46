"""Images in requests of every API, on a real server: all give the same prompt, and invalid ones are reported by field."""

import asyncio
import base64
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from patch_encoder import __file__ as PROGRAM
from server_process import MESSAGES, ServerProcess, serving
from video_files import as_video
from vision_language_models import as_png, folder, picture

from effllm.cli.server import media
from effllm.cli.server.media import NOT_FETCHED, MediaLoader, MediaPart
from effllm.runtime.images.media import MediaCache, MediaItem
from effllm.runtime.images.media_markers import media_marker
from effllm.runtime.images.video_file import decode_video

__all__ = ["folder"]  # a fixture

DATA = [base64.b64encode(as_png(picture(seed))).decode() for seed in (1, 2)]
URLS = [f"data:image/png;base64,{each}" for each in DATA]
LONG = "It is so, " * 30


def parts(*urls: str, text: str = "Who?") -> list[dict]:
    return [{"role": "user", "content": [*({"type": "image_url", "image_url": {"url": url}} for url in urls),
                                         {"type": "text", "text": text}]}]


@pytest.fixture(scope="module")
def server(folder):
    stderr = tempfile.TemporaryFile("a+b")
    flags = ("--port", "0", "--json", "--parallel", "2", "-c", "512", "--name", "seer")
    process = subprocess.Popen([sys.executable, "-P", PROGRAM, "serve", str(folder), *flags], stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=stderr)
    try:
        yield ServerProcess(process, stderr)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        stderr.close()


def said(reply) -> str:
    assert reply.status == 200, reply.body
    return reply.json["choices"][0]["message"]["content"]


FIXED = {"temperature": 0, "max_tokens": 10, "ignore_eos": True}


def test_each_api_comes_to_the_same_answer(server):
    one, other = (said(server.chat(parts(url), **FIXED)) for url in URLS)
    assert one != other
    reply = server.respond([{"role": "user", "content": [{"type": "input_image", "image_url": URLS[0]},
                                                         {"type": "input_text", "text": "Who?"}]}],
                           max_output_tokens=10, ignore_eos=True)
    assert reply.status == 200 and reply.json["output"][-1]["content"][0]["text"] == one
    reply = server.message([{"role": "user", "content": [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA[0]}}, {"type": "text", "text": "Who?"}]}],
        **FIXED)
    assert reply.status == 200 and reply.json["content"][-1]["text"] == one
    config = {"temperature": 0, "maxOutputTokens": 10}
    reply = server.request("POST", "/v1beta/models/seer:generateContent", {"generationConfig": config, "contents": [{"parts": [
        {"inlineData": {"mimeType": "image/png", "data": DATA[1]}}, {"text": "Who?"}]}]})
    assert reply.status == 200 and other.startswith(text := reply.json["candidates"][0]["content"]["parts"][0]["text"]) and text
    options = {"temperature": 0, "num_predict": 10}
    reply = server.request("POST", "/api/chat", {"messages": [{"role": "user", "content": "Who?", "images": [DATA[1]]}], "stream": False,
                                                 "options": options})
    assert reply.status == 200 and other.startswith(reply.json["message"]["content"]) and reply.json["message"]["content"]
    reply = server.request("POST", "/api/generate", {"prompt": "Who?", "images": [DATA[1]], "stream": False, "options": options})
    assert reply.status == 200 and other.startswith(reply.json["response"]) and reply.json["response"]


def test_what_a_tool_shows_is_seen_in_each_api(server):
    """Codex, Claude Code and others read an image file by a tool, and send its result."""
    called = {"id": "call12345", "type": "function", "function": {"name": "look", "arguments": "{}"}}

    def chat(*given: dict) -> str:
        return said(server.chat([*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [called]},
                                 {"role": "tool", "tool_call_id": called["id"], "content": [*given]}], **FIXED))

    one, other = (chat({"type": "image_url", "image_url": {"url": url}}) for url in URLS)
    assert one != other
    reply = server.respond([*MESSAGES, {"type": "function_call", "call_id": "call12345", "name": "look", "arguments": "{}"},
                            {"type": "function_call_output", "call_id": "call12345",
                             "output": [{"type": "input_image", "image_url": URLS[0]}]}], max_output_tokens=10, ignore_eos=True)
    assert reply.status == 200 and reply.json["output"][-1]["content"][0]["text"] == one
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA[0]}}
    use, result = {"type": "tool_use", "id": "call12345", "name": "look", "input": {}}, {"type": "tool_result", "tool_use_id": "call12345"}
    reply = server.message([*MESSAGES, {"role": "assistant", "content": [use]},
                            {"role": "user", "content": [{**result, "content": [block]}]}], **FIXED)
    assert reply.status == 200 and reply.json["content"][-1]["text"] == one
    reply = server.request("POST", "/api/chat", {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [called]},
                                                              {"role": "tool", "tool_name": "look", "images": [DATA[1]]}],
                                                 "stream": False, "options": {"temperature": 0, "num_predict": 10}})
    assert reply.status == 200 and other.startswith(reply.json["message"]["content"])
    picture = {"inlineData": {"mimeType": "image/png", "data": DATA[1]}}
    reply = server.request("POST", "/v1beta/models/seer:generateContent", {
        "generationConfig": {"temperature": 0, "maxOutputTokens": 10}, "contents": [
            {"parts": [{"text": MESSAGES[0]["content"]}]}, {"role": "model", "parts": [{"functionCall": {"name": "look", "args": {}}}]},
            {"parts": [{"functionResponse": {"name": "look", "response": {"output": ""}, "parts": [picture]}}]}]})
    assert reply.status == 200 and other.startswith(reply.json["candidates"][0]["content"]["parts"][0]["text"])
    left = chat({"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}})
    assert left == chat({"type": "text", "text": f"[image left out: {NOT_FETCHED}]"})
    server.wait_for_output("image in a tool result left out")


def test_what_was_read_of_an_image_is_not_read_again(server):
    asked = parts(URLS[0], text=LONG + "Who?")
    first = server.chat(asked, **FIXED)
    again = server.chat(asked, **FIXED)
    assert said(again) == said(first)
    assert again.json["usage"]["prompt_tokens_details"]["cached_tokens"] > 60
    further = [*asked, {"role": "assistant", "content": said(first)}, {"role": "user", "content": "Why?"}]
    reply = server.chat(further, **FIXED)
    assert reply.json["usage"]["prompt_tokens_details"]["cached_tokens"] >= first.json["usage"]["prompt_tokens"] - 1
    new = base64.b64encode(as_png(picture(3))).decode()
    reply = server.chat(parts(f"data:image/png;base64,{new}", text=LONG + "Who?"), **FIXED)
    assert reply.json["usage"]["prompt_tokens_details"]["cached_tokens"] < 16 and said(reply) != said(first)


def test_two_at_once_have_each_their_own_image(server):
    alone = [said(server.chat(parts(url, text=LONG), **FIXED)) for url in URLS]
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda url: server.chat(parts(url, text=LONG), **FIXED), URLS * 2))
    assert [said(each) for each in replies] == alone * 2


def test_several_images_stand_where_they_were_put(server):
    both = server.chat(parts(*URLS), **FIXED)
    turned = server.chat(parts(*reversed(URLS)), **FIXED)
    plain = server.chat([{"role": "user", "content": "Who?"}], **FIXED)
    assert said(both) != said(turned)
    assert both.json["usage"]["prompt_tokens"] - plain.json["usage"]["prompt_tokens"] == 32
    events = server.chat(parts(*URLS), stream=True, **FIXED).events
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in events if isinstance(each, dict)) == said(both)


def test_a_video_is_its_moments_each_after_its_second(server):
    clip = as_video(3)
    urls = [f"data:image/png;base64,{base64.b64encode(as_png(each.pixels)).decode()}" for each in decode_video(clip, "it")]
    frames = [(f"<{second:.1f} seconds>", url) for second, url in zip((0, 0.8, 1.5, 2.3), urls, strict=True)]
    apart = [part for words, url in frames for part in ({"type": "text", "text": words}, {"type": "image_url", "image_url": {"url": url}})]
    whole = {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{base64.b64encode(clip).decode()}"}}
    words = {"type": "text", "text": "Who?"}
    moving, still = (server.chat([{"role": "user", "content": [*given, words]}], **FIXED) for given in ([whole], apart))
    assert said(moving) == said(still) and moving.json["usage"]["prompt_tokens"] == still.json["usage"]["prompt_tokens"]
    for url, told in (("https://example.com/cat.mp4", "videos are not fetched"), ("data:video/mp4;base64,!", "not a base64-encoded video"),
                      ("data:video/mp4;base64,AAAA", "not a readable video")):
        reply = server.chat([{"role": "user", "content": [words, {"type": "video_url", "video_url": {"url": url}}]}])
        assert reply.status == 400 and told in reply.error["message"] and reply.error["param"] == "messages[0].content[1]"


def test_tokens_are_counted_before_anything_is_looked_at(server):
    def count(*data: str) -> int:
        content = [*({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": each}} for each in data),
                   {"type": "text", "text": "Who?"}]
        return server.message([{"role": "user", "content": content}], path="/v1/messages/count_tokens").json["input_tokens"]

    new = base64.b64encode(as_png(picture(77))).decode()
    assert count(DATA[0], new) - count() == 32
    prompt = server.request("POST", "/apply-template", {"messages": parts(URLS[0])}).json["prompt"]
    assert "[image " in prompt and "Who?" in prompt


def test_clients_are_told_that_it_takes_images(server):
    assert server.request("GET", "/props").json["modalities"]["vision"] is True
    assert "vision" in server.request("GET", "/v1/models").json["data"][0]["capabilities"]
    assert "vision" in server.request("POST", "/api/show", {"model": "seer"}).json["capabilities"]


@pytest.mark.parametrize(("url", "words"), [
    ("https://example.com/cat.png", "not fetched from URLs"), ("http://127.0.0.1/cat.png", "not fetched from URLs"),
    ("file:///etc/passwd", "not fetched from URLs"), ("data:image/png,abc", "not a base64-encoded image"),
    ("data:image/png;base64,!!!!", "not a base64-encoded image"), ("data:image/png;base64,AAAA", "not a readable image"),
    (None, "not a base64-encoded image")])
def test_an_invalid_image_is_reported_by_its_field(server, url, words):
    reply = server.chat(parts(url))
    assert reply.status == 400 and words in reply.error["message"] and reply.error["param"] == "messages[0].content[0]"


@pytest.mark.parametrize("url", [URLS[0].replace("data:image/png;base64", "DATA:Image/PNG;charset=x;BASE64"), f" \n{URLS[0]}", DATA[0],
                                 "data:;base64," + DATA[0].replace("+", "%2B").replace("/", "%2f").replace("=", "%3D")])
def test_addresses_of_data_are_read_however_they_are_written(server, url):
    assert said(server.chat(parts(url), **FIXED)) == said(server.chat(parts(URLS[0]), **FIXED))


@pytest.mark.parametrize("kind", ["alone", "counted", "beside another"])
def test_a_text_cannot_stand_for_an_image_that_did_not_come_with_it(server, kind):
    asked = [{"role": "user", "content": f"see {media_marker('1' * 32)} here"}]
    reply = {"alone": lambda: server.chat(asked, **FIXED), "counted": lambda: server.message(asked, path="/v1/messages/count_tokens"),
             "beside another": lambda: server.chat([*parts(URLS[0]), *asked], **FIXED)}[kind]()
    assert reply.status == 400 and "send it with the request" in reply.json["error"]["message"]


def test_images_are_made_one_after_the_other_and_only_so_many_wait(monkeypatch):
    """A few bytes may come to many points."""
    running, most, cache = [], [], MediaCache({})

    class Seer:
        accepts_images = True

        def require_vision(self) -> MediaCache:
            return cache

        def add_image(self, data: bytes, where: str) -> MediaItem:
            running.append(where)
            most.append(len(running))
            time.sleep(0.01)
            running.pop()
            return cache.add(picture(data[0]))

    async def asked() -> list[object]:
        taking = MediaLoader(Seer(), print)
        sent = [[MediaPart(lambda each=each: base64.b64encode(bytes([each])).decode(), "it", lambda text: None)] for each in range(8)]
        assert await taking.all([]) == ()
        return await asyncio.gather(*map(taking.all, sent), return_exceptions=True)

    monkeypatch.setattr(media, "MAX_WAITING_NBYTES", 3 * picture(0).nbytes)
    found = asyncio.run(asked())
    assert max(most) == 1 and [isinstance(each, tuple) for each in found] == [True] * 4 + [False] * 4
    assert {(each.status, each.code) for each in found[4:]} == {(503, "queue_full")}


def test_other_ways_to_refer_to_an_image_are_distinguished(server):
    url = {"type": "image", "source": {"type": "url", "url": "https://example.com/cat.png"}}
    reply = server.message([{"role": "user", "content": [url]}])
    assert reply.status == 400 and "not fetched" in json.dumps(reply.json)
    reply = server.respond([{"role": "user", "content": [{"type": "input_image", "file_id": "file_1"}]}])
    assert reply.status == 400 and "file ids are not supported" in reply.error["message"]
    reply = server.request("POST", "/api/generate", {"prompt": "Who?", "raw": True, "images": [DATA[0]], "stream": False})
    assert reply.status == 400 and "raw" in reply.json["error"]
    long = server.chat(parts(*URLS, text="word " * 600))
    assert long.status == 400 and long.error["code"] == "context_length_exceeded"


def test_a_model_of_text_refuses_images_in_every_api():
    with serving() as server:
        reply = server.chat(parts(URLS[0]))
        assert reply.status == 400 and "does not support image input" in reply.error["message"]
        assert server.request("GET", "/props").json["modalities"]["vision"] is False
        assert "capabilities" not in server.request("GET", "/v1/models").json["data"][0]
        reply = server.request("POST", "/api/chat", {"messages": [{"role": "user", "content": "Who?", "images": [DATA[0]]}]})
        assert reply.status == 400 and "does not support image input" in reply.json["error"]
        assert "vision" not in server.request("POST", "/api/show", {"model": "fable"}).json["capabilities"]
