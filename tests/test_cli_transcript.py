"""Exported conversations and named files, without a terminal: what is written, and what a hostile text cannot do."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from effllm import UsageError
from effllm.cli.attachment import Attachment, complete_path, expand_path, with_attachments
from effllm.cli.transcript import transcript

HOSTILE = "one\x1b]0;owned\x07 two\x1b[2J three\x9b31m four\rfive\u202e six"


def session(system: str | None = None, *contents: str) -> SimpleNamespace:
    messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return SimpleNamespace(system=system, messages=messages)


def test_markdown_has_a_heading_per_turn() -> None:
    text = transcript(Path("talk.MD"), "fable", session("Be brief.", "Who?", "A fox.\n"))
    assert text == "# A conversation with fable\n\n## System\n\nBe brief.\n\n## You\n\nWho?\n\n## Answer\n\nA fox.\n"


def test_json_holds_all_of_it() -> None:
    text = transcript(Path("talk.json"), "fable", session(None, "狐?", HOSTILE))
    assert json.loads(text) == {"model": "fable", "system": None, "messages": session(None, "狐?", HOSTILE).messages}


@pytest.mark.parametrize("name", ["talk.md", "talk.json"])
def test_an_exported_file_may_be_shown_on_a_terminal(name: str) -> None:
    text = transcript(Path(name), "m\x1b[31m", session(HOSTILE, HOSTILE, HOSTILE))
    assert not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 or c == "\u202e" for c in text)
    assert "one" in text and "six" in text


@pytest.mark.parametrize("name", ["talk", "talk.txt", ".md"])
def test_an_ending_that_names_no_format_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="neither .md nor .json"):
        transcript(Path(name), "fable", session(None, "a"))


def test_a_file_that_holds_a_fence_gets_a_longer_one() -> None:
    message = with_attachments([Attachment("a.md", "```\nx\n```\n", 3), Attachment("b.txt", "y", 1)], "What is it?")
    assert message == "a.md:\n````\n```\nx\n```\n````\n\nb.txt:\n````\ny\n````\n\nWhat is it?"
    assert with_attachments([], "as it is") == "as it is"


def test_paths_as_they_are_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert expand_path("~/a b.txt") == tmp_path / "a b.txt" == expand_path("'~/a b.txt'") and expand_path("a") == Path("a")
    (tmp_path / "notes.txt").touch()
    (tmp_path / "novels").mkdir()
    (tmp_path / "novels" / "one.txt").touch()
    (tmp_path / ".hidden").touch()
    assert complete_path("no") == ["notes.txt", "novels/"] and complete_path("") == ["notes.txt", "novels/"]
    assert complete_path("novels/o") == ["novels/one.txt"] and complete_path("~/.h") == ["~/.hidden"]
    assert complete_path("absent/x") == [] == complete_path("~nobody-here/x")
