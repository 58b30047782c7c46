"""Tags of reasoning other than the usual ones, from vocabularies and templates."""

import sys
from pathlib import Path

from effllm.runtime.text import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent))
from test_text import CONFIG, byte_level, copy_of_fable, save, special


def test_other_tags_of_reasoning(tmp_path: Path) -> None:
    """Seed's, which a template opens where none is wanted, and Mistral's, whose vocabularies hold them in all models."""
    template = "{{ messages[0].content }}>{% if thinking_budget == 0 %}<seed:think><seed:cot_budget_reflect>{% endif %}"
    seed = Tokenizer.load(copy_of_fable(tmp_path, tokenizer_config={"chat_template": template}), CONFIG)
    chat = [{"role": "user", "content": "<seed:think>"}]
    wanted, unwanted = seed.encode_chat(chat), seed.encode_chat(chat, **seed.think_tags.off)
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
