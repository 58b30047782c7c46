"""The chat page of `effllm serve` in a real browser (Chromium, driven by playwright): a user's paths through it, and answers that try to be
more than text."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess, serving, wait_until

from effllm.runtime.sessions.conversation_file import load_conversation

playwright = pytest.importorskip("playwright.sync_api")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.peer, pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")]

LONG = 60_000  # ms


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving("--overflow", "shift", "--seed", "4") as server:
        yield server


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, server: ServerProcess):
    """A new user's page; no script error may occur."""
    yield from opened(browser, server)


def opened(browser, server: ServerProcess):
    context = browser.new_context(accept_downloads=True)
    page, wrong = context.new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.goto(f"http://127.0.0.1:{server.port}/")
    page.wait_for_selector("#model option", state="attached", timeout=LONG)
    yield page
    context.close()
    assert not wrong


def wish(page, **fields: str) -> None:
    page.click("#open-settings")
    for name, value in fields.items():
        page.fill(f"#settings [name={name}]", value)
    page.click("#settings button")


def say(page, text: str) -> None:
    page.fill("#text", text)
    page.press("#text", "Enter")


def answered(page) -> None:
    wait_until(lambda: page.is_visible("#send") and not page.inner_text("#state"))


def messages(page) -> list[tuple[str, str]]:
    return [("user" if "user" in each.get_attribute("class") else "model", each.query_selector(".body").inner_text())
            for each in page.query_selector_all(".message")]


def test_a_conversation_continues_and_stays(page) -> None:
    wish(page, max_tokens="24", temperature="0")
    say(page, "Tell me a story about the fox.")
    answered(page)
    say(page, "And then?")
    answered(page)
    said = messages(page)
    assert [who for who, _ in said] == ["user", "model", "user", "model"] and all(text for _, text in said)
    assert said[2] == ("user", "And then?") and "the token limit was reached" in said[3][1]
    assert re.fullmatch(r"24 tokens, [\d.]+ a second", page.inner_text(".message:last-child .cost"))
    page.reload()
    page.click("#conversations .open")
    assert messages(page) == said and page.inner_text("#conversations .open") == "Tell me a story about the fox."
    page.once("dialog", lambda dialog: dialog.accept())
    page.hover("#conversations li")
    page.click("#conversations .act >> nth=1")
    page.wait_for_selector(".greeting")
    assert page.query_selector_all("#conversations li") == []


def test_an_answer_is_stopped_had_again_and_its_question_changed(page) -> None:
    say(page, "Tell me a long story.")
    page.wait_for_selector(".message.assistant .answer", timeout=LONG)
    page.keyboard.press("Escape")
    page.wait_for_selector("#send:visible", timeout=LONG)
    assert page.inner_text("#state") in ("stopped", "") and len(messages(page)) == 2
    wish(page, max_tokens="8", temperature="0")
    page.hover(".message.assistant")
    page.click(".message.assistant >> text=Again")
    answered(page)
    again = messages(page)
    assert len(again) == 2 and page.inner_text(".message:last-child .cost").startswith("8 tokens")
    page.hover(".message.user")
    page.click(".message.user >> text=Edit")
    page.fill(".message.user textarea", "Tell me of the sea.")
    page.click(".message.user >> text=Send")
    answered(page)
    assert messages(page)[0] == ("user", "Tell me of the sea.") and messages(page)[1] != again[1] and len(messages(page)) == 2


def test_a_conversation_is_a_file_that_the_terminal_reads(page, tmp_path: Path) -> None:
    wish(page, max_tokens="8", temperature="0", system="You tell tales.")
    say(page, "The fox & the <king>")
    answered(page)
    page.hover("#conversations li")
    with page.expect_download() as download:
        page.click("#conversations .act >> nth=0")
    download.value.save_as(file := tmp_path / "saved.json")
    history = load_conversation(file)
    assert history.system == "You tell tales." and [each["role"] for each in history.messages] == ["user", "assistant"]
    assert history.messages[0]["content"] == "The fox & the <king>"
    page.set_input_files("#load-file", str(file))
    wait_until(lambda: len(page.query_selector_all("#conversations li")) == 2)
    assert [text for _, text in messages(page)][0] == "The fox & the <king>"
    (other := tmp_path / "other.json").write_text(json.dumps({"messages": 3}))
    page.set_input_files("#load-file", str(other))
    page.wait_for_selector("#state.wrong")
    assert page.inner_text("#state").startswith("other.json is not a saved conversation")


def test_files_go_with_a_message(page, tmp_path: Path) -> None:
    wish(page, max_tokens="4")
    (note := tmp_path / "note.md").write_text("a ```fence``` within\n")
    (blob := tmp_path / "blob.bin").write_bytes(bytes(range(256)))
    page.set_input_files("#attach-file", [str(note)])
    page.set_input_files("#attach-file", [str(blob)])
    page.wait_for_selector("#state.wrong")
    assert page.inner_text("#state") == "blob.bin is not a text, image, video or audio file"
    say(page, "What does it say?")
    page.wait_for_selector(".message.assistant", timeout=LONG)
    assert messages(page)[0][1] == "note.md:\n````\na ```fence``` within\n````\n\nWhat does it say?"


def test_an_image_is_sent_with_a_message_where_the_model_takes_it(browser, page, tmp_path: Path) -> None:
    from test_vision_quantized import save_idefics3
    from vision_language_models import as_png
    from vision_models import PICTURES

    (file := tmp_path / "waves.png").write_bytes(as_png(PICTURES["photo"]))
    page.set_input_files("#attach-file", [str(file)])
    page.wait_for_selector("#state.wrong")
    assert page.inner_text("#state") == "waves.png: this model does not support images"
    with serving("-n", "4", model=str(save_idefics3(tmp_path / "model"))) as server:
        for other in opened(browser, server):
            other.wait_for_load_state("networkidle")  # until it knows that this model sees
            other.set_input_files("#attach-file", [str(file)])
            other.wait_for_selector("#attached li")
            say(other, "What is it?")
            answered(other)
            other.reload()
            other.click("#conversations .open")
            assert other.evaluate("document.images[0].naturalWidth") == 160 and len(messages(other)) == 2
        assert "image of 160 × 120" in server.err


def test_a_video_is_sent_with_a_message_as_frames(browser, page, tmp_path: Path) -> None:
    from video_files import as_video
    from vision_cases import CASES
    from vision_models import save_vision_model

    (file := tmp_path / "clip.webm").write_bytes(as_video(3, "webm", "libvpx-vp9"))
    (live := tmp_path / "live.webm").write_bytes(as_video(3, "webm", "libvpx-vp9", live="1"))
    (wrong := tmp_path / "wrong.mkv").write_bytes(b"no video")
    page.set_input_files("#attach-file", [str(file)])
    page.wait_for_selector("#state.wrong")
    assert page.inner_text("#state") == "clip.webm: this model does not support images"
    (folder := tmp_path / "model").mkdir()
    save_vision_model(folder, "perception_lm", CASES["perception_lm"])
    with serving("-n", "4", "-c", "512", model=str(folder)) as server:
        for other in opened(browser, server):
            other.wait_for_load_state("networkidle")  # until it knows that this model sees
            sent = []
            other.on("request", lambda request, sent=sent: sent.append(request.post_data) if request.post_data else None)
            other.set_input_files("#attach-file", [str(wrong)])
            other.wait_for_selector("#state.wrong")
            assert other.inner_text("#state") == "wrong.mkv cannot be decoded by this browser: convert it to MP4 or WebM"
            for named in (file, live):
                other.set_input_files("#attach-file", [str(named)])
                other.wait_for_selector("#attached li")
                say(other, "What happens?")
                answered(other)
            asked = [json.loads(body)["messages"] for body in sent if "image_url" in body]
            assert [[part["type"] for part in turns[0]["content"]] for turns in asked] == [["text", "image_url"] * 4 + ["text"]] * 2
            captions = [[part["text"] for part in turn["content"] if part["type"] == "text"] for turn in asked[1] if turn["role"] == "user"]
            first, *rest = captions[0][:-1]
            assert first == "<0.0 seconds>\n" and [each[:3] for each in rest] == ["\n<0", "\n<1", "\n<2"] and len(captions[1]) >= 4
            other.reload()
            other.click("#conversations .open")
            assert len(other.query_selector_all("img.moment")) == len(captions[0]) + len(captions[1]) - 2
            assert other.get_attribute("img.moment", "title") == "0.0 seconds"
        assert "image of 64 × 48" in server.err


def test_audio_is_sent_with_a_message_where_the_model_takes_it(browser, page, tmp_path: Path) -> None:
    """The second is of two channels and megabytes, which the page makes one of 16,000 samples a second."""
    import numpy as np
    from audio_models import as_wav, save_audio_model, sound

    (file := tmp_path / "tones.wav").write_bytes(as_wav(sound(0.8)))
    page.set_input_files("#attach-file", [str(file)])
    page.wait_for_selector("#state.wrong")
    assert page.inner_text("#state") == "tones.wav: this model does not support audio"
    (large := tmp_path / "large.wav").write_bytes(as_wav(np.repeat(sound(9.0, rate=44_100), 6), 6 * 44_100))
    assert large.stat().st_size > 4 << 20
    (folder := tmp_path / "model").mkdir()
    save_audio_model("audioflamingo3", folder)
    with serving("-n", "4", "-c", "512", model=str(folder)) as server:
        for other in opened(browser, server):
            other.wait_for_load_state("networkidle")  # until it knows that this model hears
            sent = []
            other.on("request", lambda request, sent=sent: sent.append(request.post_data) if request.post_data else None)
            for named in (file, large):
                other.set_input_files("#attach-file", [str(named)])
                other.wait_for_selector("#attached li")
                say(other, "Who is it?")
                answered(other)
            assert not other.query_selector_all("#state.wrong") and len(messages(other)) == 4
            heard = [re.findall(r'"data":"([^"]+)","format":"wav"', body) for body in sent if "input_audio" in body]
            assert [len(each) for each in heard] == [1, 2] and heard[1][0] == heard[0][0]
            assert 16_000 * 2 * 9 < len(heard[1][1]) * 3 / 4 < 16_000 * 2 * 9 + 100
            other.reload()
            other.click("#conversations .open")
            other.wait_for_function("[...document.querySelectorAll('audio')].map((each) => Math.round(each.duration)).join() === '1,9'")
        assert "audio clip of 0.8 s" in server.err and "audio clip of 9.0 s" in server.err


def test_images_of_a_long_conversation_fit_into_a_request(browser, tmp_path: Path) -> None:
    """Noise of several megapixels, which no format makes much smaller: three of them are beyond what a request may hold."""
    import numpy as np
    from test_vision_quantized import save_idefics3
    from vision_language_models import as_png

    draw = np.random.default_rng(3)
    files = [tmp_path / f"noise{number}.png" for number in range(3)]
    for file in files:
        file.write_bytes(as_png(draw.integers(0, 256, (1500, 2000, 3), np.uint8)))
    assert sum(file.stat().st_size for file in files) * 4 / 3 > 32 << 20
    with serving("-n", "4", model=str(save_idefics3(tmp_path / "model"))) as server:
        for page in opened(browser, server):
            page.wait_for_load_state("networkidle")
            sent = []
            page.on("request", lambda request, sent=sent: sent.append(request.post_data) if request.post_data else None)
            for number, file in enumerate(files):
                page.set_input_files("#attach-file", [str(file)])
                page.wait_for_selector("#attached li")
                say(page, f"What is {number}?")
                answered(page)
            assert not page.query_selector_all("#state.wrong") and len(messages(page)) == 6
            pictures = [re.findall(r"data:image/(?:png|jpeg);base64,[^\"]+", body) for body in sent]
            assert [len(each) for each in pictures] == [1, 2, 3] and all(len(body) < 32 << 20 for body in sent)
            assert pictures[0][0].startswith("data:image/png") and pictures[1][0] == pictures[0][0], "what fits goes as it is"
            assert pictures[2][0].startswith("data:image/jpeg")
            say(page, "And now?")
            answered(page)
            assert re.findall(r"data:image/(?:png|jpeg);base64,[^\"]+", sent[3]) == pictures[2], "the same again, which the server knows"
        tokens, cached = map(int, re.findall(r"(\d+) tokens in \((\d+) cached\)", server.err)[-1])
        assert cached > 0.9 * tokens


def test_a_key_is_asked_for(browser) -> None:
    with serving("--api-key", "secret") as server:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"http://127.0.0.1:{server.port}/")
        page.wait_for_selector("#settings[open]", timeout=LONG)
        assert "needs an API key" in page.inner_text("#settings")
        page.fill("[name=key]", "wrong")
        page.click("#settings button")
        wait_until(lambda: "Wrong API key" in page.inner_text("#settings"))
        page.fill("[name=key]", "secret")
        page.click("#settings button")
        page.wait_for_selector("#model option", state="attached", timeout=LONG)
        wait_until(lambda: not page.inner_text("#state"))
        assert "secret" not in page.evaluate("JSON.stringify(localStorage)")
        page.click("#open-settings")
        assert "API key." not in page.inner_text("#settings"), "whoever opens it is asked for nothing"
        context.close()


def test_a_server_that_is_gone_is_reported(browser) -> None:
    with serving() as server:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"http://127.0.0.1:{server.port}/")
        page.wait_for_selector("#model option", state="attached", timeout=LONG)
    say(page, "Hello?")
    page.wait_for_selector(".problem", timeout=LONG)
    assert page.inner_text(".problem") == "the server does not answer: is effllm serve still running?"
    context.close()


SHAPES = {
    "one\ntwo\n\nthree": "<p>one\ntwo</p><p>three</p>",
    "**bold** *lean* _lean_ ~~gone~~ `co*d*e` snake_case_name 2*3*4": "<p><strong>bold</strong> <em>lean</em> <em>lean</em> "
    "<del>gone</del> <code>co*d*e</code> snake_case_name 2<em>3</em>4</p>",
    "***both*** and **a *b* c**": "<p><strong><em>both</em></strong> and <strong>a <em>b</em> c</strong></p>",
    "## Head ##\ntext": "<h2>Head</h2><p>text</p>",
    "- a\n- b\n  - c\n- d": "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>",
    "3. a\n4. b\n\ntext": '<ol start="3"><li>a</li><li>b</li></ol><p>text</p>',
    "1. a\n\n   more\n2. b": "<ol><li><p>a</p><p>more</p></li><li><p>b</p></li></ol>",
    "- a\n  ```py\n  x = 1\n  ```\n- b": '<ul><li>a<div class="code"><div class="bar"><span>py</span><button type="button" '
    'data-copies="x = 1">Copy</button>'
    "</div><pre><code>x = 1</code></pre></div></li><li>b</li></ul>",
    "> a\n> - b": "<blockquote><p>a</p><ul><li>b</li></ul></blockquote>",
    "| a | b |\n|---|:-:|\n| 1 | x \\| y |\n| 2 |": '<div class="wide"><table><thead><tr><th>a</th><th>b</th></tr></thead><tbody>'
    "<tr><td>1</td><td>x | y</td></tr><tr><td>2</td><td></td></tr></tbody></table></div>",
    "a\n---\nb": "<p>a</p><hr><p>b</p>",
    "see [it](https://a.example/x_(y)) or https://b.example/c.": '<p>see <a href="https://a.example/x_(y)" target="_blank" rel="noopener '
    'noreferrer">it</a> or <a href="https://b.example/c" target="_blank" rel="noopener noreferrer">https://b.example/c</a>.</p>',
    "[x](javascript:alert(1)) <script>alert(1)</script> <img src=x onerror=alert(1)>": "<p>[x](javascript:alert(1)) &lt;script&gt;alert(1)"
    "&lt;/script&gt; &lt;img src=x onerror=alert(1)&gt;</p>",
    "[y](data:text/html,x) ![z](https://spy.example/p.png)": '<p>[y](data:text/html,x) <a href="https://spy.example/p.png" target="_blank" '
    'rel="noopener noreferrer">z</a></p>',
    "\\*no\\* and `` a`b ``": "<p>*no* and <code>a`b</code></p>",
}


@pytest.mark.parametrize("text", SHAPES)
def test_markdown(page, text: str) -> None:
    assert shown(page, text) == SHAPES[text]


def shown(page, text: str, upto: str = "[text]") -> str:
    return page.evaluate("""async ([text, upto]) => {
        const { show } = await import("./browser/markdown.js"), place = document.createElement("div");
        for (let end = upto; end < text.length; end += 1) show(place, text.slice(0, end));
        show(place, text);
        return place.innerHTML;
    }""", [text, len(text) if upto == "[text]" else 1])


@pytest.mark.parametrize("text", SHAPES)
def test_a_text_that_grows_ends_as_one_that_was_whole(page, text: str) -> None:
    assert shown(page, text, "each") == SHAPES[text]


@pytest.mark.parametrize("text", ["[" * 20_000, "*a" * 10_000, "**a _b " * 3_000, "> " * 3_000 + "x", "`" * 20_000, "- " * 3_000,
                                  "|a" * 5_000 + "\n" + "|-" * 5_000, "_" * 20_000, "https://" * 3_000, "![](" * 5_000,
                                  "~~a" * 8_000, "\\" * 20_001])
def test_a_malformed_answer_does_not_stop_the_page(page, text: str) -> None:
    seconds = page.evaluate("""async (text) => {
        const { show } = await import("./browser/markdown.js"), began = performance.now();
        show(document.createElement("div"), text);
        return (performance.now() - began) / 1000;
    }""", text)
    assert seconds < 20  # a second at most where nothing else runs; what grows as a power of the length would take minutes
