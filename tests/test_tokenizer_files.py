"""Metadata of a model folder besides the vocabulary: reasoning tags, end-of-turn tokens, the template; and broken files."""

import json
import os
from dataclasses import replace

import pytest
from saved_tokenizers import CONFIG, FABLE, byte_level, copy_of_fable, save, special
from tokenizers import AddedToken

from effllm import EffllmError, ModelNotFound
from effllm.runtime.templates.template import TemplateError
from effllm.runtime.tokenizer import Tokenizer, TokenizerError
from effllm.runtime.tokens.tokenizer_panics import silence_panic


@pytest.fixture(scope="module")
def fable():
    return Tokenizer.load(FABLE, CONFIG)


# ---- reasoning ----------------------------------------------------------------------------------------------------------


def test_thinking_is_known_from_the_template_or_the_vocabulary(fable, tmp_path):
    assert not fable.thinks
    assert Tokenizer.load(copy_of_fable(tmp_path, tokenizer_config={"chat_template": "{{ '<think>' }}"}), CONFIG).thinks


def test_a_prompt_that_opens_the_reasoning(tmp_path):
    template = "{{ messages[0].content }}<think>\n{% if enable_thinking is defined and not enable_thinking %}\n</think>\n\n{% endif %}"
    tokenizer = Tokenizer.load(copy_of_fable(tmp_path, tokenizer_config={"chat_template": template}), CONFIG)
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.opens_thinking(tokenizer.encode_chat(chat)) and not tokenizer.opens_thinking(
        tokenizer.encode_chat(chat, enable_thinking=False)
    )


# ---- where a turn ends --------------------------------------------------------------------------------------------------


def test_stop_ids_of_fable(fable):
    assert fable.stop_ids == {0, 4}


@pytest.mark.parametrize("eos", [7, [7, 8], [7, 8, True, None, "x", -1]])
def test_stop_ids_from_generation_config(eos, tmp_path):
    tokenizer = Tokenizer.load(copy_of_fable(tmp_path, generation_config={"eos_token_id": eos}), replace(CONFIG, eos_token_ids=(9,)))
    assert tokenizer.stop_ids == {0, 4, 9, 7} | ({8} if isinstance(eos, list) else set())


def test_stop_ids_from_the_vocabulary_and_the_tokenizer_config(tmp_path):
    backend = byte_level(special("<s>"), special("<|stop-here|>"), special("<|eot_id|>"), special("<|im_end|>"), special("<|other|>"))
    tokenizer = Tokenizer.load(save(tmp_path, backend, eos_token={"content": "<|stop-here|>"}), replace(CONFIG, eos_token_ids=()))
    assert tokenizer.stop_ids == {backend.token_to_id(t) for t in ("<|stop-here|>", "<|eot_id|>", "<|im_end|>")}


@pytest.mark.parametrize("eos", [None, "<|stop-here|>"])
def test_a_tag_of_html_that_is_no_special_token_ends_a_turn_only_where_nothing_else_does(eos, tmp_path):
    backend = byte_level(special("<|stop-here|>"), AddedToken("</s>", special=False, normalized=False))
    tokenizer = Tokenizer.load(save(tmp_path, backend, **({} if eos is None else {"eos_token": eos})), replace(CONFIG, eos_token_ids=()))
    assert tokenizer.stop_ids == {backend.token_to_id(eos or "</s>")}


def test_end_closes_only_a_channel_where_there_are_channels(tmp_path):
    names = ["<|channel|>", "<|return|>", "<|call|>", "<|end|>"]
    backend = byte_level(*map(special, names))
    tokenizer = Tokenizer.load(save(tmp_path, backend), replace(CONFIG, eos_token_ids=()))
    assert tokenizer.stop_ids == {backend.token_to_id("<|return|>"), backend.token_to_id("<|call|>")}


# ---- templates and files ------------------------------------------------------------------------------------------------


def test_a_base_model_has_no_template_and_says_so(tmp_path):
    tokenizer = Tokenizer.load(copy_of_fable(tmp_path, tokenizer_config={"chat_template": None}), CONFIG)
    assert tokenizer.template is None
    with pytest.raises(TemplateError, match="base model") as caught:
        tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert "--raw" in caught.value.hint


def test_special_tokens_from_the_older_file(tmp_path):
    copy_of_fable(
        tmp_path, tokenizer_config={"chat_template": "{{ bos_token }}|{{ eos_token }}|{{ sep_token is defined }}", "bos_token": None}
    )
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<|system|>"}, "eos_token": "<|user|>"}))
    assert Tokenizer.load(tmp_path, CONFIG).render_chat([]) == "<|system|>|<|end|>|False"


def test_missing_tokenizer_names_the_file_and_the_next_step(tmp_path):
    with pytest.raises(ModelNotFound, match="tokenizer.json") as caught:
        Tokenizer.load(tmp_path, CONFIG)
    assert caught.value.exit_code == 3 and "copy tokenizer.json" in caught.value.hint
    (tmp_path / "vocab.json").write_bytes(b"x")
    with pytest.raises(ModelNotFound) as caught:
        Tokenizer.load(tmp_path, CONFIG)
    assert "save_pretrained" in caught.value.hint


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": -1}}}', b"\xff\xfe", b"{" * 9000]
)
def test_a_broken_tokenizer_is_one_line(content, tmp_path):
    copy_of_fable(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(EffllmError) as caught:
        Tokenizer.load(tmp_path, CONFIG)
    assert "tokenizer.json" in caught.value.message and "\n" not in caught.value.message and caught.value.hint


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_broken_companion_file_is_one_line(name, content, tmp_path):
    copy_of_fable(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.load(tmp_path, CONFIG)
    assert name in caught.value.message and "\n" not in caught.value.message


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    tokenizer = Tokenizer.load(copy_of_fable(tmp_path), replace(CONFIG, vocab_size=100))
    with pytest.raises(TokenizerError, match="100 embedding rows"):
        tokenizer.encode("Once upon a time there was a king")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_tokenizer(tmp_path):
    (copy_of_fable(tmp_path) / "tokenizer.json").chmod(0)
    with pytest.raises(ModelNotFound, match="cannot read"):
        Tokenizer.load(tmp_path, CONFIG)


@pytest.mark.parametrize(("key", "value"), [("normalizer", {"type": "Precompiled", "precompiled_charsmap": ""}),
                                            ("model", {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]],
                                                       "continuing_subword_prefix": "##"})])
def test_a_panic_of_the_library_is_one_line_too(key, value, tmp_path, capfd):
    copy_of_fable(tmp_path, tokenizer={key: value})
    with pytest.raises(TokenizerError, match="is not a readable tokenizer: ") as caught:
        Tokenizer.load(tmp_path, CONFIG)
    assert "\n" not in caught.value.message and "fetch" in caught.value.hint
    assert capfd.readouterr().err == ""


def test_what_others_say_meanwhile_is_passed_on(capfd):
    with silence_panic():
        os.write(2, b"a line of another thread\n")
    with pytest.raises(KeyError), silence_panic():
        os.write(2, b"another one\n")
        raise KeyError
    os.write(2, b"the end\n")
    assert capfd.readouterr().err == "a line of another thread\nanother one\nthe end\n"
