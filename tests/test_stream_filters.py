"""Stream filters give the same result however the text was split, and nothing of a stop string, a tag or an escape sequence leaks."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effllm import UsageError
from effllm.runtime.tokens.reasoning import ChannelFilter, ThinkFilter
from effllm.runtime.tokens.stream_filters import StopStrings, partial_suffix
from effllm.runtime.tokens.terminal_text import TerminalFilter, sanitize


@st.composite
def cut(draw, texts):
    """A text and a way to cut it into pieces, some of them empty."""
    text = draw(texts)
    borders = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    edges = [0, *borders, len(text)]
    return text, [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def first_stop(text, stops):
    """The definition: the stop string that is complete first (of two, the longer) ends the text where it begins."""
    for end in range(len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            longest = max(done, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(cut(st.text("abc\n", max_size=40)), st.lists(st.text("abc\n", min_size=1, max_size=5), max_size=4))
def test_stop_strings_do_not_depend_on_the_pieces(text_and_pieces, stops):
    text, pieces = text_and_pieces
    stop = StopStrings(stops)
    shown = "".join(stop.push(piece) for piece in pieces)
    shown += stop.flush()
    expected, matched = first_stop(text, stops)
    assert (shown, stop.matched, stop.hit) == (expected, matched, matched is not None)


@given(cut(st.text("ab", max_size=60)), st.text("ab", min_size=1, max_size=6))
def test_one_stop_string_is_partition(text_and_pieces, mark):
    text, pieces = text_and_pieces
    stop = StopStrings([mark])
    assert "".join([*map(stop.push, pieces), stop.flush()]) == text.partition(mark)[0]


@given(cut(st.text("abc", max_size=40)), st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3))
def test_what_is_shown_never_needs_to_be_taken_back(text_and_pieces, stops):
    text, pieces = text_and_pieces
    stop, shown, given_text = StopStrings(stops), "", ""
    for piece in pieces:
        shown, given_text = shown + stop.push(piece), given_text + piece
        assert first_stop(text, stops)[0].startswith(shown)
        assert stop.hit or len(given_text) - len(shown) < max(map(len, stops)), "holds back more than a stop string could need"


@given(cut(st.text("abc", max_size=40)), st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3), st.integers(0, 40))
def test_a_stop_string_may_begin_in_what_was_said(text_and_pieces, stops, at):
    text, pieces = text_and_pieces
    expected, matched = first_stop(text, stops)
    if matched is not None and len(expected) + len(matched) <= at:
        return  # the answer ended before
    before, after = text[:at], text[at:]
    stop = StopStrings(stops, before)
    shown = "".join([*map(stop.push, after), stop.flush()])
    assert before[: len(before) - stop.overlap] + shown == expected


def test_a_stop_string_over_three_tokens():
    stop = StopStrings(["\nUser:"])
    assert [stop.push(p) for p in ("Yes.", "\nUs", "e", "r: no")] == ["Yes.", "", "", ""]
    assert stop.hit and stop.flush() == "" and stop.push("more") == ""


def test_a_false_start_is_shown_as_soon_as_it_is_false():
    stop = StopStrings(["\nUser:"])
    assert [stop.push(p) for p in ("a\nUs", "ual")] == ["a", "\nUsual"]


def test_flush_gives_back_what_could_have_become_a_stop():
    stop = StopStrings(["###"])
    assert stop.push("title ##") == "title " and stop.flush() == "##" and stop.flush() == "" and not stop.hit


def test_of_two_stops_the_one_complete_first_ends_the_text():
    stop = StopStrings(["abcd", "bc"])
    assert stop.push("xabcd") == "xa" and stop.matched == "bc"


def test_an_empty_stop_string_is_a_usage_error():
    with pytest.raises(UsageError, match="empty"):
        StopStrings(["ok", ""])


def test_no_stop_strings_hold_nothing_back():
    assert StopStrings([]).push("anything") == "anything"


def test_held_suffix():
    assert partial_suffix("ab<", ["<think>"]) == 1 and partial_suffix("<think>", ["<think>"]) == 0
    assert partial_suffix("aab", ["aabaab"]) == 3


# ---- reasoning ----------------------------------------------------------------------------------------------------------


def split_thinking(text, started):
    """The definition on a whole text: (thinking, answer)."""
    if not started:
        if not text.lstrip().startswith("<think>"):
            return "", text
        text = text.lstrip().removeprefix("<think>")
    thinking, _, answer = text.partition("</think>")
    return thinking.strip(), answer.lstrip()


think_texts = st.lists(st.sampled_from(["<think>", "</think>", "<thi", "</", "a", "b ", " ", "\n", "nk>"]), max_size=14).map("".join)


@given(cut(think_texts), st.booleans())
def test_thinking_does_not_depend_on_the_pieces(text_and_pieces, started):
    text, pieces = text_and_pieces
    block = ThinkFilter(starts_inside=started)
    parts = [part for piece in pieces for part in block.push(piece)] + block.flush()
    thinking, answer = split_thinking(text, started)
    assert "".join(t for kind, t in parts if kind == "thinking") == thinking
    assert "".join(t for kind, t in parts if kind == "answer") == answer
    assert all(t for _, t in parts) and {kind for kind, _ in parts} <= {"answer", "thinking"}


def test_thinking_streams_piece_by_piece():
    block = ThinkFilter()
    pushed = [block.push(p) for p in ("\n<th", "ink>\nLet me", " see.", "\n</thi", "nk>\n\nHel", "lo <think>")]
    assert pushed == [[], [("thinking", "Let me")], [("thinking", " see.")], [], [("answer", "Hel")], [("answer", "lo <think>")]]


def test_an_answer_about_tags_is_an_answer():
    text = "The tag <think> opens it, </think> ends it."
    block = ThinkFilter()
    assert "".join(part for kind, part in block.push(text) + block.flush() if kind == "answer") == text and block.flush() == []


@pytest.mark.parametrize(("text", "started"), [("<think>on and on", False), ("on and on", True)])
def test_thinking_that_never_ends_is_no_answer(text, started):
    block = ThinkFilter(starts_inside=started)
    assert "".join(part for kind, part in block.push(text) + block.flush() if kind == "answer") == ""


def test_an_unfinished_opening_tag_is_the_answer():
    block = ThinkFilter()
    assert block.push(" <thi") == [] and block.flush() == [("answer", " <thi")]


def test_other_tags():
    block = ThinkFilter("[T]", "[/T]")
    assert block.push("[T]x[/T]y") == [("thinking", "x"), ("answer", "y")]


# ---- channels -----------------------------------------------------------------------------------------------------------

REPLY = "<|start|>assistant"
THOUGHT, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"


def channelled(text, prompt=REPLY):
    """(reasoning, answer) of a whole text."""
    block = ChannelFilter(prompt)
    parts = block.push(text) + block.flush()
    return tuple("".join(part for kind, part in parts if kind == wanted) for wanted in ("thinking", "answer"))


def test_channels_tell_reasoning_from_the_answer():
    assert channelled(f"{THOUGHT}Hm. Yes.<|end|>{REPLY}{FINAL}Yes!") == ("Hm. Yes.", "Yes!")
    assert channelled(f"{FINAL}Yes!") == ("", "Yes!") and channelled("<|message|>Yes!") == ("", "Yes!")
    assert channelled(f"{THOUGHT}a<|end|>{REPLY}{THOUGHT}b<|end|>{REPLY}{FINAL}c") == ("a\n\nb", "c")
    call = "<|channel|>commentary to=functions.sum <|constrain|>json<|message|>"
    assert channelled(f"{call}{{}}<|end|>{REPLY}{FINAL}3") == ("{}", "3")
    assert channelled(f" to=functions.sum{THOUGHT}x") == ("x", "")
    assert channelled(f"{THOUGHT}a{FINAL}b") == ("a", "b"), "a missing end is no part of the text"


def test_a_prompt_may_end_anywhere_in_a_message():
    assert channelled("Yes!", f"{REPLY}{FINAL}") == ("", "Yes!") == channelled("s!", f"x<|end|>{REPLY}{FINAL}Ye")[:1] + ("Yes!",)
    assert channelled(f"well<|end|>{REPLY}{FINAL}Yes!", f"{REPLY}{THOUGHT}Oh ") == ("well", "Yes!")
    assert channelled("is<|message|>hm", f"{REPLY}<|channel|>analys") == ("hm", "")
    assert channelled("Once upon a time", "A tale: ") == ("", "Once upon a time")
    assert channelled(f"{REPLY}{FINAL}Hi", "<|start|>user<|message|>Hello<|end|>") == ("", "Hi")


def test_a_model_that_knows_no_channels_is_heard():
    for text in ("Yes!", "the end", "t", "assistants are", "Say <|message|> to me", "a < b <| c"):
        assert channelled(text)[0] == "" and channelled(text)[1] in (text, text.removeprefix("assistant"))
    long = "<|channel|>" + "x" * 2 * ChannelFilter.HEADER_LIMIT
    assert channelled(long) == ("", long)
    assert channelled("<|channel|>analy") == ("", ""), "an unfinished header says nothing"


def test_reasoning_streams_piece_by_piece():
    block = ChannelFilter(REPLY)
    pieces = ("<|channel|>", "analysis", "<|message|>", "Let me", " see", "<|end|>", "<|start|>", "assistant", "<|channel|>", "final",
              "<|message|>", "Hel", "lo <|")
    assert [block.push(piece) for piece in pieces] == [[], [], [], [("thinking", "Let me")], [("thinking", " see")], [], [], [], [], [], [],
                                                       [("answer", "Hel")], [("answer", "lo ")]]
    assert block.flush() == [("answer", "<|")]


channel_texts = st.lists(st.sampled_from([*ChannelFilter.MARKERS, "assistant", "analysis", "final", " to=f", "a", " ", "<|", "|>", "\n",
                                          THOUGHT, FINAL, "x" * 100]), max_size=16).map("".join)


@given(cut(channel_texts), st.sampled_from([REPLY, "", f"{REPLY}{FINAL}", f"{REPLY}{THOUGHT}a", f"{REPLY}<|channel|>fin"]))
def test_channels_do_not_depend_on_the_pieces(text_and_pieces, prompt):
    text, pieces = text_and_pieces
    block = ChannelFilter(prompt)
    parts = [part for piece in pieces for part in block.push(piece)] + block.flush()
    assert tuple("".join(t for kind, t in parts if kind == wanted) for wanted in ("thinking", "answer")) == channelled(text, prompt)
    assert all(t for _, t in parts)



# ---- terminal -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("plain\n\ttext é 日本 🦊", "plain\n\ttext é 日本 🦊"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07x", "x"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]52;c;ZXZpbA==\x07", ""),
        ("\x9b2Jx\x9d0;t\x9cy", "xy"),
        ("\x1bPq#0\x1b\\z", "z"),
        ("\x1bc\x1b(Breset", "reset"),
        ("safe\rEVIL\x08\x08\x7f\x00", "safeEVIL"),
        ("a\r\nb", "a\nb"),
        ("\u202etxt.exe\u2066", "txt.exe"),
        ("\x1b", ""),
        ("lone \ud800 half", "lone \ufffd half"),
    ],
)
def test_sanitize(text, clean):
    assert sanitize(text) == clean


@given(st.text())
def test_sanitize_leaves_no_control_character(text):
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", sanitize(text))


escapes = st.lists(
    st.sampled_from(["\x1b", "[", "]", "31", ";", "m", "\x07", "\\", "\x9b", "\x9d", "\x9c", "a", " ", "\n", "\r", "P", "🦊"]), max_size=20
)


@given(cut(escapes.map("".join)))
def test_terminal_filter_does_not_depend_on_the_pieces(text_and_pieces):
    text, pieces = text_and_pieces
    terminal = TerminalFilter()
    assert "".join([*map(terminal.push, pieces), terminal.flush()]) == sanitize(text)


def test_terminal_filter_does_not_wait_for_ever():
    terminal = TerminalFilter()
    shown = terminal.push("\x1b]0;") + "".join(terminal.push("word ") for _ in range(100))
    assert len(shown) > 200 and "\x1b" not in shown
