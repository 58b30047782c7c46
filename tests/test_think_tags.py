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
