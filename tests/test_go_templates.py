"""Ollama's Go templates: the chat format recognized by its tokens, and the chat templates of those formats."""

from pathlib import Path

import pytest
from gguf_bytes import small_model
from hub_user import HubUser
from library_trees import OllamaTree

from effllm.runtime.config import read_config
from effllm.runtime.templates.ollama_templates import FORMATS, detect_format, install_template, jinja_source
from effllm.runtime.templates.template import ChatTemplate, TemplateRefused
from effllm.runtime.tokenizer import Tokenizer

CHAT = [{"role": "system", "content": "S"}, {"role": "user", "content": "A"}, {"role": "assistant", "content": "B"},
        {"role": "user", "content": "C"}]
# A template as people write it for Ollama -> its format, and what CHAT becomes with an answer begun.
WRITTEN = {
    "{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n{{ end }}<|im_start|>user\n{{ .Prompt }}<|im_end|>\n": (
        "ChatML", "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\nB<|im_end|>\n"
        "<|im_start|>user\nC<|im_end|>\n<|im_start|>assistant\n"),
    "<|im_start|>{{ .Role }}<|im_sep|>{{ .Content }}<|im_end|>": (
        "Phi 4", "<|im_start|>system<|im_sep|>S<|im_end|><|im_start|>user<|im_sep|>A<|im_end|><|im_start|>assistant<|im_sep|>B<|im_end|>"
        "<|im_start|>user<|im_sep|>C<|im_end|><|im_start|>assistant<|im_sep|>"),
    "<|start_header_id|>user<|end_header_id|>\n\n{{ .Prompt }}<|eot_id|>": (
        "Llama 3", "<|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nA<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nB<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nC<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    "<start_of_turn>user\n{{ .Content }}<end_of_turn>": (
        "Gemma", "<start_of_turn>user\nS\n\nA<end_of_turn>\n<start_of_turn>model\nB<end_of_turn>\n<start_of_turn>user\nC<end_of_turn>\n"
        "<start_of_turn>model\n"),
    "[INST] <<SYS>>{{ .System }}<</SYS>> {{ .Prompt }} [/INST]": (
        "Llama 2", "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nA [/INST] B </s><s>[INST] C [/INST]"),
    "[INST] {{ .Prompt }} [/INST]": ("Mistral", "[INST] S\n\nA[/INST] B</s>[INST] C[/INST]"),
    "[SYSTEM_PROMPT]{{ .System }}[/SYSTEM_PROMPT][INST]{{ .Prompt }}[/INST]": (
        "Mistral with system prompts", "[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]A[/INST]B</s>[INST]C[/INST]"),
    "<|system|>\n{{ .System }}<|end|>\n<|user|>": (
        "Phi 3", "<|system|>\nS<|end|>\n<|user|>\nA<|end|>\n<|assistant|>\nB<|end|>\n<|user|>\nC<|end|>\n<|assistant|>\n")}


@pytest.mark.parametrize("source", WRITTEN)
def test_a_format_is_told_by_its_tokens_and_written(source: str) -> None:
    name, expected = WRITTEN[source]
    assert detect_format(source) == name
    assert ChatTemplate(jinja_source(name)).render(CHAT) == expected


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_writes_each_turn_once_and_refuses_what_it_has_none_for(name: str) -> None:
    template = ChatTemplate(jinja_source(name))
    for chat in (CHAT, CHAT[1:]):
        said = template.render([{**each, "content": f"<{each['content']}>"} for each in chat])
        assert [said.count(f"<{each['content']}>") for each in chat] == [1] * len(chat)
        assert [said.index(f"<{each['content']}>") for each in chat] == sorted(said.index(f"<{each['content']}>") for each in chat)
    with pytest.raises(TemplateRefused):
        template.render([*CHAT, {"role": "tool", "content": "x"}])


def test_an_unknown_template_is_none() -> None:
    assert detect_format("{{ .Prompt }}") is None and detect_format("<|user|>{{ .Prompt }}<|end|><|channel|>final") is None


def test_what_goes_before_a_text_goes_before_a_chat(tmp_path: Path) -> None:
    for adds in (True, False):
        (tmp_path / "m.gguf").write_bytes(small_model({"tokenizer.ggml.add_bos_token": adds}))
        tokenizer = Tokenizer.load(tmp_path / "m.gguf", read_config(tmp_path / "m.gguf"))
        install_template(tokenizer, "Gemma")
        said = tokenizer.render_chat(CHAT)
        assert said.startswith("<s><start_of_turn>user\n" if adds else "<start_of_turn>user\n")
        assert tokenizer.encode_chat(CHAT).count(1) == adds


def test_a_model_without_a_template_is_asked_as_ollama_asks_it(tmp_path: Path) -> None:
    user, tree = HubUser(tmp_path, "http://127.0.0.1:9"), OllamaTree(tmp_path / ".ollama" / "models")
    tree.add("small", small_model(), template="<|im_start|>user\n{{ .Prompt }}<|im_end|>\n")
    tree.add("odd", small_model(), template="{{ .Prompt }}")
    assert user.run("show", "ollama:small", "--json").json["chat_template"] is True
    assert user.run("show", "ollama:odd", "--json").json["chat_template"] is False
    assert {row["name"]: row["chat_template"] for row in user.run("list", "--json").json["models"][1:]} == {
        "ollama:small": True, "ollama:odd": False}
    run = user.run("run", "ollama:small", "a", "-n", "1", "-c", "64")
    assert "using that of ChatML" in run.err, run.err
    assert "base model" in user.run("run", "ollama:odd", "a", "-n", "1").err
