"""`effllm run --image` and `/image`: what the user sees of images, and of invalid ones."""

import json
import os
import sys
from contextlib import closing

import pexpect
import pytest
from command_line import CliRun
from patch_encoder import __file__ as PROGRAM
from patch_encoder import patch_sights_of
from vision_language_models import TEMPLATE, as_png, folder, picture

from effllm.runtime.engine import open_engine
from effllm.runtime.events import Call
from effllm.runtime.images import media as albums
from effllm.runtime.images.media_markers import marker_digests
from effllm.runtime.images.modality import IMAGE_INPUT
from effllm.runtime.mcp.agent_loop import append_result
from effllm.runtime.mcp.results import ToolResult
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.sampler import SamplerSettings
from effllm.runtime.session import Session
from effllm.runtime.templates.template import ChatTemplate
from effllm.runtime.tokenizer import Tokenizer
from effllm.runtime.tool_calls.tool_calling import tools_of

__all__ = ["folder"]  # a fixture


@pytest.fixture(autouse=True)
def sees(monkeypatch):
    monkeypatch.setattr(albums, "encoders_of", patch_sights_of)


@pytest.fixture
def files(tmp_path):
    made = [tmp_path / f"{seed}.png" for seed in (1, 2)]
    for seed, path in enumerate(made):
        path.write_bytes(as_png(picture(seed)))
    return made


GREEDY = ("--temp", "0", "-n", "8", "--ignore-eos", "-c", "256")


def test_an_answer_depends_on_the_given_images(folder, files):
    one, other = (CliRun("run", str(folder), "Who?", "--image", str(path), *GREEDY) for path in files)
    assert one.code == other.code == 0 and one.out != other.out
    assert "image of 64 × 48: 16 tokens" in one.err
    both = CliRun("run", str(folder), "Who?", "--image", str(files[0]), "--image", str(files[1]), "--stats", *GREEDY)
    alone = CliRun("run", str(folder), "Who?", "--stats", *GREEDY)
    assert both.err.count("image of") == 1, "the same line is said once"
    prompt = [int(ran.err.partition("prompt ")[2].split()[0]) for ran in (alone, both)]
    assert prompt[1] - prompt[0] == 32 and both.out not in (one.out, other.out, alone.out)


def test_low_bit_weights_see_what_the_model_was_published_with(folder, files):
    """What is quantized is the text model alone; the images are seen from the folder that it was made of."""
    ran = CliRun("run", str(folder), "Who?", "--bits", "8", "--image", str(files[0]), *GREEDY)
    assert ran.code == 0 and "image of" in ran.err


def test_unreadable_images_are_reported_before_weights_are_read(folder, files, tmp_path):
    text = tmp_path / "text.png"
    text.write_text("no picture")
    for argv, said in ((("fable", "Who?", "--image", str(files[0])), "does not support image input"),
                       (("fable", "-f", str(files[0])), "send it with --image FILE, beside the prompt"),
                       ((str(folder), "Who?", "--image", str(text)), "not a readable image"),
                       ((str(folder), "Who?", "--image", str(tmp_path / "absent.png")), "No such file"),
                       ((str(folder), "Who?", "--raw", "--image", str(files[0])), "--image cannot be combined with --raw")):
        ran = CliRun("run", *argv)
        assert ran.code in (1, 2) and said in ran.err and not ran.out, argv
        assert len(ran.err.strip().splitlines()) == 2, "the failure and its next step"
    ran = CliRun("chat", "fable", "--image", str(files[0]))
    assert ran.code == 2 and "effllm run MODEL --image FILE" in ran.err


def test_an_image_too_many_for_the_context_is_reported(folder, files):
    ran = CliRun("run", str(folder), "Who?", "--image", str(files[0]), "-c", "20")
    assert ran.code == 5 and "context" in ran.err and "image of" not in ran.err


def test_plan_and_show_state_image_support_and_its_cost(folder):
    tower = patch_sights_of(folder, type("Config", (), {"hidden_size": 64}))[IMAGE_INPUT].bytes_needed()
    shown, plan = (json.loads(CliRun(command, str(folder), "--json").out) for command in ("show", "plan"))
    assert shown["images"] == {"placeholder": "<image>", "bytes": tower} and plan["media_bytes"] == tower
    for command, line in (("show", "supported, as <image>"), ("plan", "the vision tower takes 48.00 KiB")):
        ran = CliRun(command, str(folder))
        assert ran.code == 0 and line in ran.out and "takes images too" not in ran.err
    assert json.loads(CliRun("show", "fable", "--json").out)["images"] is None
    assert json.loads(CliRun("plan", "fable", "--json").out)["media_bytes"] == 0


def test_an_image_goes_with_the_next_message_of_a_chat(folder, files):
    """By /image, and by the path that a terminal writes where a file is dropped on it; off takes it back."""
    line = ["-P", PROGRAM, "chat", str(folder), "--temp", "0", "-n", "8", "-c", "256"]
    terminal = pexpect.spawn(sys.executable, line, encoding="utf-8", timeout=60, echo=False, env={**os.environ, "TERM": "dumb"},
                             dimensions=(40, 200))
    try:
        terminal.expect("/help lists commands")
        for typed, said in (("/image absent.png", "No such file"), (f"/image {files[0]}", "1.png: 16 tokens attached to the next message"),
                            ("/image off", "no files attached"), (f"'{files[1]}'", "2.png: 16 tokens attached to the next message"),
                            ("Who?", "image of 64 × 48: 16 tokens"), ("/image", "no files attached")):
            terminal.sendline(typed)
            terminal.expect_exact(said)
        terminal.sendline("/exit")
        terminal.expect(pexpect.EOF)
    finally:
        terminal.close(force=True)


WRITES = ("{% for c in m['tool_calls'] or [] %}<tool_call>{\"name\": \"{{ c.function.name }}\", "
          "\"arguments\": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}")
TAUGHT = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + TEMPLATE.replace(
    "{% if m['content'] is string %}", f"{WRITES}{{% if m['content'] is string %}}")
# one with a place for images in what a user says alone
SHY = TAUGHT.replace("'<image>' if", "('<image>' if m['role'] == 'user' else '') if").replace(
    "{{ m['content'] }}", "{{ m['content'] if m['role'] == 'user' else m['content'] | replace('<image>', '') }}")


@pytest.mark.parametrize(("template", "where"), [(TAUGHT, "tool"), (SHY, "user")])
def test_an_image_that_a_tool_gave_back_is_seen(folder, template, where):
    """In what the tool said, or where the template has no place there, in a message behind it."""
    engine = list(open_engine(folder, EngineOptions(device="cpu", ctx=512, encoder_path=str(folder))))[-1]
    with closing(engine):
        engine.media = albums.open_media(folder, engine.config)
        tokenizer = Tokenizer.load(folder, engine.config)
        tokenizer.template = ChatTemplate(template)
        session = Session(engine, tokenizer, SamplerSettings(temperature=0), max_tokens=4)
        session.tools = tools_of([{"type": "function", "function": {"name": "look"}}])
        call = Call("look", "{}", "abc")
        calling = {"role": "assistant", "content": "", "tool_calls": [{"id": "abc", "type": "function", "function": {
            "name": "look", "arguments": "{}"}}]}
        session.messages, session.open_calls = [{"role": "user", "content": "Who?"}, calling], [call]
        told = append_result(session, call, None, "", ToolResult("This:", (as_png(picture(1)), b"no picture")))
        assert len(told.remarks) == 1 and "image 2 of look is left out" in told.remarks[0]
        prompt = session._prompt()
        assert prompt.count("<|user|>") == (2 if where == "user" else 1) and len(marker_digests(prompt)) == 1
        assert marker_digests(prompt[prompt.index(f"<|{where}|>\n", prompt.index("tool_call")) :])
        seen = list(session.answer_tool_results())[-1].stats
        assert len(session._prompts.tokenize(prompt)) == seen.prompt_tokens == session._prompts.count(prompt)
