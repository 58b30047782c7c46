"""Tags of reasoning and of answers, and end-of-turn tokens, from vocabularies and templates."""

from dataclasses import replace
from pathlib import Path

import pytest
from saved_tokenizers import CONFIG, FABLE, byte_level, copy_of_fable, save, special
from tokenizers import AddedToken

from effllm.runtime.engine import open_engine
from effllm.runtime.events import Notice
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.sampler import SamplerSettings
from effllm.runtime.session import Session
from effllm.runtime.tokenizer import Tokenizer
from effllm.runtime.tokens.reasoning import ANSWER_TAGS, ThinkFilter


def test_other_tags_of_reasoning(tmp_path: Path) -> None:
    """Seed's, which a template opens where none is wanted, and Mistral's, whose vocabularies hold them in all models."""
    template = "{{ messages[0].content }}>{% if thinking_budget == 0 %}<seed:think><seed:cot_budget_reflect>{% endif %}"
    seed = Tokenizer.load(copy_of_fable(tmp_path, tokenizer_config={"chat_template": template}), CONFIG)
    chat = [{"role": "user", "content": "<seed:think>"}]
    wanted, unwanted = seed.encode_chat(chat), seed.encode_chat(chat, **seed.think_tags.disable_options)
    assert seed.thinks and not seed.opens_thinking(wanted) and seed.opens_thinking(unwanted)
    for prompt, text in ((wanted, "<seed:think>so</seed:think>yes"), (unwanted, "so</seed:cot_budget_reflect></seed:think>yes")):
        parts = [*(block := seed.reasoning(prompt)).push(text), *block.flush()]
        assert [kind for kind, _ in parts] == ["thinking", "answer"] and parts[1][1] == "yes"
    for name in ("m", "r"):
        (tmp_path / name).mkdir()
    mistral = Tokenizer.load(save(tmp_path / "m", byte_level(special("[THINK]"), special("[/THINK]"))), CONFIG)
    assert not mistral.thinks
    reasoning = Tokenizer.load(copy_of_fable(tmp_path / "r", tokenizer_config={"chat_template": "{{ '[THINK]' }}"}), CONFIG)
    assert reasoning.thinks and reasoning.think_tags.close == "[/THINK]"


def test_a_channel_of_thoughts(tmp_path: Path) -> None:
    """Gemma 4's: a name follows the opening token; an empty one says nothing, also where the prompt has it."""
    template = "<|turn>{{ messages[0].content }}<turn|>{% if not enable_thinking %}<|channel>thought\n<channel|>{% endif %}"
    marks = special("<|channel>"), special("<channel|>"), special("<|turn>"), special("<turn|>")
    (tmp_path / "base").mkdir()
    assert not Tokenizer.load(save(tmp_path / "base", byte_level(*marks)), CONFIG).thinks
    made = Tokenizer.load(save(tmp_path, byte_level(*marks), chat_template=template), CONFIG)
    assert made.thinks and made.encode("<turn|>")[-1] in made.stop_ids
    for thinking in (True, False):
        prompt = made.encode_chat([{"role": "user", "content": "Hi"}], enable_thinking=thinking)
        assert not made.opens_thinking(prompt)
        for text, expected in (("<|channel>thought\nso\n<channel|>yes<turn|>", [("thinking", "so"), ("answer", "yes")]),
                               ("<|channel>thought\n<channel|>yes<turn|>", [("answer", "yes")]), ("yes", [("answer", "yes")])):
            stream, filter = made.stream(), made.reasoning(prompt)
            parts = [part for token in made.encode(text) for part in filter.push(stream.push(token))]
            said: dict[str, str] = {}
            for kind, part in [*parts, *filter.push(stream.flush()), *filter.flush()]:
                said[kind] = said.get(kind, "") + part
            assert list(said.items()) == expected
    assert made.opens_thinking(made.encode("<turn|><|channel>thought\n", add_special_tokens=False))


def parts_of(filter: ThinkFilter, pieces: list[str]) -> dict[str, str]:
    said: dict[str, str] = {}
    for kind, text in [*(part for piece in pieces for part in filter.push(piece)), *filter.flush()]:
        said[kind] = said.get(kind, "") + text
    return said


@pytest.mark.parametrize(("text", "said"), [
    ("<think>\nso\n</think>\n<answer>\nyes </a>\n</answer>", {"thinking": "so", "answer": "yes </a>"}),
    ("<think>so</think>\n\n<response>\nyes\n</response>\n", {"thinking": "so", "answer": "yes"}),
    ("<think>so</think>yes <answer>no</answer>", {"thinking": "so", "answer": "yes <answer>no</answer>"}),
    ("<answer>end it by </answer> and more</answer>", {"answer": "end it by </answer> and more"}),
    ("\n<answer> yes</answ", {"answer": "yes</answ"}), ("<answer>yes\n", {"answer": "yes\n"}), ("<answ", {"answer": "<answ"}),
    ("<think>so</think><answ", {"thinking": "so", "answer": "<answ"}), ("<think>so</think>", {"thinking": "so"}),
    ("<answer></answer>", {}), ("<other>yes</other>", {"answer": "<other>yes</other>"}), ("</answer>", {"answer": "</answer>"}),
])
def test_tags_around_an_answer_are_no_part_of_it(text: str, said: dict[str, str]) -> None:
    def made(pieces: list[str]) -> dict[str, str]:
        return parts_of(ThinkFilter(answer_tags=ANSWER_TAGS), pieces)

    assert made([text]) == made(list(text)) == said
    assert all(made([text[:at], text[at:]]) == said for at in range(len(text)))


def test_without_such_tags_they_are_words_of_the_answer() -> None:
    assert parts_of(ThinkFilter(), ["<think>so</think>\n<answer>yes</answer>"]) == {"thinking": "so", "answer": "<answer>yes</answer>"}


@pytest.mark.parametrize("closes", ["[END FINAL RESPONSE]", ""])
def test_apriel_says_where_its_answer_begins(tmp_path: Path, closes: str) -> None:
    """Its template has the words with which reasoning begins; of two versions one ends its answers with words too."""
    template = "{{ messages[0].content }}<|begin_assistant|>\nHere are my reasoning steps:\n"
    made = Tokenizer.load(save(tmp_path, byte_level(special("[BEGIN FINAL RESPONSE]")), chat_template=template), CONFIG)
    prompt = made.encode_chat([{"role": "user", "content": "Hi"}])
    assert made.thinks and made.opens_thinking(prompt) and made.unsupported_think("off")
    text = f"1. so\n[BEGIN FINAL RESPONSE]\n[yes]\n{closes}"
    stream = made.stream()
    pieces = [*map(stream.push, made.encode(text)), stream.flush()]
    for cut in (pieces, [text]):
        said = parts_of(made.reasoning(prompt), cut)
        assert said["thinking"] == "1. so" and said["answer"].rstrip() == "[yes]"
    assert parts_of(made.reasoning(made.encode("Hi")), [f"yes{closes}"]) == {"answer": "yes"}
    assert not Tokenizer.load(save(tmp_path, byte_level(special("[BEGIN FINAL RESPONSE]"))), CONFIG).thinks


def test_kimi_vl_writes_tags_that_neither_its_template_nor_its_vocabulary_has(tmp_path: Path) -> None:
    made = Tokenizer.load(save(tmp_path, byte_level(special("<|media_start|>")), chat_template="{{ messages[0].content }}"), CONFIG)
    prompt = made.encode_chat([{"role": "user", "content": "Hi"}])
    stream = made.stream()
    pieces = [*map(stream.push, made.encode("◁think▷so◁/think▷yes")), stream.flush()]
    assert made.thinks and parts_of(made.reasoning(prompt), pieces) == {"thinking": "so", "answer": "yes"}
    assert parts_of(made.reasoning(prompt), ["yes, ◁think▷"]) == {"answer": "yes, ◁think▷"}
    assert not Tokenizer.load(save(tmp_path, byte_level(special("<|media_begin|>"))), CONFIG).thinks


def test_cohere_marks_thoughts_and_answers(tmp_path: Path) -> None:
    """Whether the vocabulary has the answer's marks as special tokens, which decoding drops, or not."""
    for at, is_special in enumerate((True, False)):
        marks = [special(mark) for mark in ("<|START_THINKING|>", "<|END_THINKING|>")]
        marks += [AddedToken(mark, special=is_special) for mark in ("<|START_RESPONSE|>", "<|END_RESPONSE|>")]
        (tmp_path / str(at)).mkdir()
        made = Tokenizer.load(save(tmp_path / str(at), byte_level(*marks), chat_template="{{ messages[0].content }}"), CONFIG)
        text = "<|START_THINKING|>so<|END_THINKING|><|START_RESPONSE|>yes<|END_RESPONSE|>"
        stream = made.stream()
        pieces = [*map(stream.push, made.encode(text)), stream.flush()]
        assert parts_of(made.reasoning(made.encode("Hi")), pieces) == {"thinking": "so", "answer": "yes"}
        assert parts_of(made.reasoning(made.encode("Hi<|START_THINKING|><|END_THINKING|>")), ["yes"]) == {"answer": "yes"}


@pytest.mark.parametrize(("template", "on", "off", "unmoved"), [
    ("{{ '<think>' if enable_thinking }}", {"enable_thinking": True}, {"enable_thinking": False}, False),
    ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ '<think>' if thinking }}",
     {"enable_thinking": True, "thinking": True}, {"enable_thinking": False, "thinking": False}, False),
    ("{{ '<think>' if reasoning }}", {"enable_thinking": True, "reasoning": True}, {"enable_thinking": False, "reasoning": False}, False),
    ("{{ '<seed:think>' if thinking_budget == 0 }}", {"enable_thinking": True}, {"enable_thinking": False, "thinking_budget": 0}, False),
    ("{{ messages[0].thinking }} thinking <think>", {"enable_thinking": True}, {"enable_thinking": False}, True),
])
def test_the_reasoning_option_has_the_name_that_the_template_knows(tmp_path: Path, template: str, on: dict, off: dict,
                                                                   unmoved: bool) -> None:
    made = Tokenizer.load(copy_of_fable(tmp_path, tokenizer_config={"chat_template": template}), CONFIG)
    assert (made.thinking(True), made.thinking(False), made.no_think) == (on, off, "")
    assert not made.unsupported_think("on") and not made.unsupported_think("auto")
    assert ("no switch" in made.unsupported_think("off")) == unmoved


NANO = """{% set ns = namespace(enable_thinking=true) %}{% for m in messages %}{% if '/no_think' in m.content %}
{%- set ns.enable_thinking = false %}{% endif %}{% endfor %}
{%- for m in messages %}[{{ m.role }}]{{ m.content.replace('/no_think', '').strip() }}{% endfor %}[assistant]
{%- if ns.enable_thinking %}<think>{% else %}<think></think>{% endif %}"""


@pytest.mark.parametrize(("system", "think", "prompt"), [
    (None, "off", "[system][user]Is it?[assistant]<think></think>"),
    ("Be brief.", "off", "[system]Be brief.[user]Is it?[assistant]<think></think>"),
    (None, "auto", "[user]Is it?[assistant]<think>"), ("Be brief.", "on", "[system]Be brief.[user]Is it?[assistant]<think>")])
def test_a_switch_may_stand_in_the_system_prompt(tmp_path: Path, system: str | None, think: str, prompt: str) -> None:
    made = Tokenizer.load(copy_of_fable(tmp_path, tokenizer_config={"chat_template": NANO}), CONFIG)
    *_, engine = open_engine(FABLE, EngineOptions(device="cpu"))
    try:
        session = Session(engine, made, SamplerSettings(temperature=0), system=system, think=think, max_tokens=1)
        events = list(session.ask("Is it?"))
        assert made.decode(engine.tokens[: session.stats.prompt_tokens], skip_special_tokens=False) == prompt
        assert not [event for event in events if isinstance(event, Notice)] and session.system == system
    finally:
        engine.close()


def test_a_wish_that_changes_nothing_is_said_once(tmp_path: Path) -> None:
    made = Tokenizer.load(copy_of_fable(tmp_path, tokenizer_config={"chat_template": "{{ messages[0].content }}<think>"}), CONFIG)
    *_, engine = open_engine(FABLE, EngineOptions(device="cpu"))
    try:
        session = Session(engine, made, SamplerSettings(temperature=0), think="off", max_tokens=1)
        said = [[event.text for event in session.ask("Is it?") if isinstance(event, Notice)] for _ in range(2)]
        assert said == [["--think off has no effect: this model's chat template has no switch for it"], []]
    finally:
        engine.close()


@pytest.mark.parametrize("mark", ["[EOT]", "[EOS]", "[e~[", "[|endofturn|]", "<seed:eos>", "<|end_of_sentence|>", "<|tool_response>",
                                  "<|eot|>", "<|assistant_end|>"])
def test_marks_that_end_a_turn_where_no_file_says_so(tmp_path: Path, mark: str) -> None:
    """Of Kimi, MiniMax, EXAONE, Seed-OSS, ERNIE, Gemma 4 (behind a call of a tool), Llama 4 and Apertus."""
    made = Tokenizer.load(save(tmp_path, byte_level(special(mark))), replace(CONFIG, eos_token_ids=()))
    assert made.stop_ids == set(made.encode(mark, add_special_tokens=False))


@pytest.mark.parametrize("marks", [("<|tool_call>", '<|"|>', "<tool_call|>"),
                                   ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
                                   ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁calls▁end｜>")])
def test_marks_of_calls_are_not_shown_where_they_are_words_of_the_vocabulary(tmp_path: Path, marks: tuple[str, str, str]) -> None:
    made = Tokenizer.load(save(tmp_path, byte_level(*(AddedToken(mark, special=False, normalized=False) for mark in marks))), CONFIG)
    opened, inside, closed = marks
    ids = made.encode(f"Lät{opened}sum{inside}é{closed}.")
    stream = made.stream()
    assert "".join([*map(stream.push, ids), stream.flush()]) == made.decode(ids) == "Lätsumé."
    assert made.decode(ids, skip_special_tokens=False) == f"Lät{opened}sum{inside}é{closed}."


def test_apertus_thinks_on_an_inner_part(tmp_path: Path) -> None:
    template = "{{ '<|inner_prefix|>' }}{{ 'Deliberation: ' + ('enabled' if enable_thinking else 'disabled') }}"
    marks = special("<|inner_prefix|>"), special("<|inner_suffix|>")
    made = Tokenizer.load(save(tmp_path, byte_level(*marks), chat_template=template), CONFIG)
    stream = made.stream()
    pieces = [*map(stream.push, made.encode("<|inner_prefix|>so<|inner_suffix|>yes")), stream.flush()]
    assert parts_of(made.reasoning(made.encode("Hi")), pieces) == {"thinking": "so", "answer": "yes"}
    assert made.thinks and made.thinking(False) == {"enable_thinking": False} and not made.unsupported_think("off")
