"""Tokenizers published as tiktoken ranks: ids in the order of ranks, each broken file named, and their conversion for other programs."""

import base64
import json
import shutil
import unicodedata
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import regex
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from effllm.offload.gguf_header import GgufHeader
from effllm.runtime.config import read_config
from effllm.runtime.gguf.pre_tokenizers import KIMI, LLAMA3_WORDS, QWEN2_WORDS, SPLITTERS
from effllm.runtime.gguf.tokenizer import backend, read_vocabulary
from effllm.runtime.gguf.tokenizer_export import tokenizer_metadata
from effllm.runtime.tokenizer import Tokenizer, TokenizerError
from effllm.runtime.tokens import tiktoken_vocabulary
from effllm.runtime.tokens.tiktoken_vocabulary import DEFAULT_SPECIAL_TOKENS, TEMPLATES, VocabularyError, _byte_level_speller, read_tiktoken

FABLE = Path(__file__).parents[1] / "models" / "fable"
CONFIG = replace(read_config(FABLE), vocab_size=4000)
TEXTS = ["Hello World's 12345 words,  two spaces\n\n\tand (tabs)! HELLO'S don't DON'T",
         "naïve Äpfel 中文かなカナ漢字 한국어 テスト… 🙂👍🏽", "「日本語」（テスト）、。ﬀ ǅ ʰ Ⅷ ½",
         "x=y+1; // C++\r\nif (a_b != c->d) {\n    return x[10] * 1234567890;\n}\n\n\n", "Привет, мир! ЗДРАВСТВУЙ 2024",
         "हिन्दी में लिखा १२३४ ।", "ไทย ภาษา", "camelCase HTTPServer iPhone", "e\u0301te\u0301 A\u030angstro\u0308m"]
TEKKEN_WORDS = SPLITTERS["tekken"].patterns[0]
SPECIAL = 1000
KIMI_SETTINGS = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}, "bos_token": "[BOS]", "eos_token": "[EOS]"}


@cache
def ranks() -> dict[bytes, int]:
    """Byte strings that cross the borders of words, so that a wrong cut changes the tokens."""
    bytes_of = {text: bytes([byte]) for byte in range(256) for text in [_byte_level_speller()(bytes([byte]))]}
    made = Backend(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=1500, initial_alphabet=list(bytes_of), show_progress=False,
                                                        min_frequency=1, max_token_length=24))
    learnt = (b"".join(map(bytes_of.__getitem__, token)) for token, _ in sorted(made.get_vocab().items(), key=lambda entry: entry[1]))
    order = [bytes([byte]) for byte in range(256)] + [token for token in learnt if len(token) > 1]
    return {token: rank for rank, token in enumerate(order)}


def cut(piece: bytes) -> list[int]:
    """As the ranks say: of all neighbours that make a token the first of the lowest rank are joined, until there are none."""
    if piece in ranks():
        return [ranks()[piece]]
    parts = [piece[at:at + 1] for at in range(len(piece))]
    while joined := [(ranks()[both], at) for at in range(len(parts) - 1) if (both := parts[at] + parts[at + 1]) in ranks()]:
        at = min(joined)[1]
        parts[at:at + 2] = [parts[at] + parts[at + 1]]
    return [ranks()[part] for part in parts]


def expected(pattern: str, text: str) -> list[int]:
    pieces = regex.findall(f"(?V1){pattern}", text)
    assert "".join(pieces) == text
    return [token for piece in pieces for token in cut(piece.encode())]


def tekken(version: str = "v7", **changes: object) -> dict[str, object]:
    entries = [{"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None} for token, rank in ranks().items()]
    content = {"config": {"pattern": TEKKEN_WORDS, "num_vocab_tokens": len(entries), "default_vocab_size": SPECIAL + len(entries),
                          "default_num_special_tokens": SPECIAL, "version": version}, "vocab": entries}
    if version != "v3":
        content["special_tokens"] = [{"rank": rank, "token_str": name, "is_control": True}
                                     for rank, name in enumerate([*DEFAULT_SPECIAL_TOKENS, "[THINK]", "[/THINK]"])]
    return content | changes


def write_tekken(folder: Path, content: object) -> Path:
    (folder / "tekken.json").write_text(json.dumps(content))
    return folder


def write_tiktoken(folder: Path, **changes: object) -> Path:
    count = len(ranks())
    named = {count: "[BOS]", count + 1: "[EOS]", count + 2: "<|im_end|>", count + 3: "<think>"}
    (folder / "tiktoken.model").write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks().items()))
    added = {str(number): {"content": name, "special": name != "<think>"} for number, name in named.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(KIMI_SETTINGS | {"added_tokens_decoder": added} | changes))
    return folder


@pytest.fixture(scope="module")
def mistral(tmp_path_factory) -> Tokenizer:
    return Tokenizer.load(write_tekken(tmp_path_factory.mktemp("tekken"), tekken()), CONFIG)


@pytest.fixture(scope="module")
def hunyuan(tmp_path_factory) -> Tokenizer:
    """A line that is there twice, as its program allows."""
    folder = tmp_path_factory.mktemp("hunyuan")
    lines = [base64.b64encode(token).decode() for token in ranks()]
    (folder / "hy.tiktoken").write_text("".join(f"{text} {number}\n" for number, text in enumerate([*lines[:9], *lines[8:]])))
    stated = {"auto_map": {"AutoTokenizer": ["tokenization_hy.HYTokenizer", None]}, "eos_token": "<|eos|>",
              "chat_template": "{{ messages[0].content }}{% if enable_thinking is false %}<think>\n\n</think>\n{% endif %}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    return Tokenizer.load(folder, CONFIG)


@pytest.fixture(scope="module")
def kimi(tmp_path_factory) -> Tokenizer:
    return Tokenizer.load(write_tiktoken(tmp_path_factory.mktemp("kimi")), CONFIG)


# Without characters that this Python's Unicode has not assigned: what they are, two libraries of different years see differently.
SNIPPETS = st.lists(st.one_of(st.sampled_from(TEXTS).flatmap(lambda text: st.integers(0, len(text)).map(lambda at: text[at:at + 7])),
                              st.sampled_from([" ", "\n", "\r\n", "'s", "'LL", "/", "中A", "A中", "1", "\u0301", "\u2028"]),
                              st.text(st.characters(exclude_categories=("Cn",)), max_size=3)), max_size=12).map("".join)


@given(text=SNIPPETS)
def test_ids_are_those_of_the_ranks_and_decode(mistral: Tokenizer, kimi: Tokenizer, text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    for made, pattern, first in ((mistral, TEKKEN_WORDS, SPECIAL), (kimi, KIMI.patterns[0], 0)):
        # Words like <s>, which no rank says, hypothesis knows from other tests.
        assume(not any(word.content in text for word in made._backend.get_added_tokens_decoder().values()))
        ids = made.encode(text, add_special_tokens=False)
        assert ids == [first + token for token in expected(pattern, text)]
        assert made.decode(ids) == text


def test_what_stands_beside_the_ranks(mistral: Tokenizer, kimi: Tokenizer) -> None:
    assert mistral.encode("<s>[INST]a") == [1, 3, SPECIAL + ord("a")] and mistral.encode("a") == [1, SPECIAL + ord("a")]
    assert mistral.stop_ids == {*CONFIG.eos_token_ids, 2} and mistral.vocab_size == SPECIAL + len(ranks())
    assert mistral.encode("<SPECIAL_999>", add_special_tokens=False) == [999] and mistral.decode([3, SPECIAL + ord("a"), 4]) == "a"
    count = len(ranks())
    assert kimi.encode(f"a<|im_end|><|reserved_token_{count + 255}|>") == [ord("a"), count + 2, count + 255]
    assert kimi.stop_ids >= {count + 1, count + 2} and kimi.thinks and kimi.template is None
    assert kimi.decode([count + 3, ord("a"), count + 2]) == "<think>a"


@pytest.mark.parametrize(("version", "said"), [
    ("v3", "<s>[INST]a[/INST]b</s>[INST]Be brief.\n\nc[/INST]"),
    *((version, "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]a[/INST]b</s>[INST]c[/INST]") for version in ("v7", "v11", "v13"))])
def test_a_folder_without_a_template_is_asked_as_its_version_is(tmp_path: Path, version: str, said: str) -> None:
    made = Tokenizer.load(write_tekken(tmp_path, tekken(version)), CONFIG)
    roles = zip(("system", "user", "assistant", "user"), ("Be brief.", "a", "b", "c"))
    assert made.render_chat([{"role": role, "content": content} for role, content in roles]) == said
    assert made.thinks == (version in ("v11", "v13")) and len(made.warnings) == 1 and "template" in made.warnings[0]
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    own = Tokenizer.load(tmp_path, CONFIG)
    assert own.render_chat([{"role": "user", "content": "x"}]) == "x!" and not own.warnings


def test_other_versions_have_no_template_of_ours(tmp_path: Path) -> None:
    assert Tokenizer.load(write_tekken(tmp_path, tekken("v15")), CONFIG).template is None and "v15" not in TEMPLATES


def test_tokenizer_json_comes_first(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FABLE / name, tmp_path / name)
    assert Tokenizer.load(write_tekken(tmp_path, {}), read_config(FABLE)).source.name == "tokenizer.json"


@pytest.mark.parametrize(("content", "named"), [
    ("x", "not a valid tekken.json"), ({}, "KeyError"), (tekken(vocab=7), "has no len"),
    (tekken(vocab=[{"rank": 0, "token_bytes": "AA=="}] * 2), "2 ranks"),
    (tekken(config=tekken()["config"] | {"default_num_special_tokens": -1}), "-1 are special"),
    (tekken(config=tekken()["config"] | {"default_vocab_size": 10**12}), "names 1000000000000"),
    (tekken(config=tekken()["config"] | {"pattern": 3}), "not text"), (tekken(config=tekken()["config"] | {"pattern": "("}), "parenthesis"),
    (tekken(special_tokens=[{"rank": 5000, "token_str": "x"}]), "not consecutive"),
    (tekken(special_tokens=[{"rank": 1, "token_str": "<SPECIAL_0>"}]), "not consecutive"),
    (tekken(special_tokens=[{"rank": 0, "token_str": "a"}]), "also an ordinary token"),
    (tekken(vocab=[*tekken()["vocab"][:-1], {"rank": len(ranks()) - 1, "token_bytes": "QQ=="}]), "duplicate"),
    (tekken(vocab=[*tekken()["vocab"][:-1], {"rank": 5, "token_bytes": "QUFBQUFB"}]), "out of order"),
    (tekken(vocab=[*tekken()["vocab"][:-1], {"rank": 5, "token_bytes": 3}]), "not base64"),
])
def test_broken_files_are_named(tmp_path: Path, content: object, named: str) -> None:
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.load(write_tekken(tmp_path, content), CONFIG)
    assert named in caught.value.message and "tekken.json" in caught.value.message and caught.value.hint


def test_ranks_without_their_pattern_are_refused(tmp_path: Path) -> None:
    write_tiktoken(tmp_path, auto_map={"AutoTokenizer": ["tokenization_other.Other", None]})
    with pytest.raises(TokenizerError, match="pattern is in Python code"):
        Tokenizer.load(tmp_path, CONFIG)
    (tmp_path / "tiktoken.model").write_text("AA== x\n")
    with pytest.raises(VocabularyError, match="one of its lines"):
        read_tiktoken(tmp_path / "tiktoken.model", KIMI_SETTINGS)
    (tmp_path / "tiktoken.model").write_text("AA== 0\n")
    with pytest.raises(VocabularyError, match="256 bytes"):
        read_tiktoken(tmp_path / "tiktoken.model", KIMI_SETTINGS)


def test_tokens_that_would_take_minutes_to_cut_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiktoken_vocabulary, "MAX_SPLIT_NBYTES", 10_000)
    with pytest.raises(TokenizerError, match="exceed the size limits of a vocabulary"):
        Tokenizer.load(write_tekken(tmp_path, tekken()), CONFIG)
    monkeypatch.undo()
    monkeypatch.setattr(tiktoken_vocabulary, "MAX_MERGES", 100)
    with pytest.raises(TokenizerError, match="more than 100 merges"):
        Tokenizer.load(tmp_path, CONFIG)


def test_a_conversion_that_cuts_words_as_others_do_is_mended(mistral: Tokenizer, tmp_path: Path) -> None:
    """As the first tokenizer.json of Mistral Small 3.1; one of another vocabulary is left as it is."""
    raw = json.loads(mistral.to_json())
    raw["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = LLAMA3_WORDS
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    made = Tokenizer.load(tmp_path, CONFIG)
    assert len(made.warnings) == 1 and "Mistral" in made.warnings[0] and json.loads(made.to_json())["pre_tokenizer"] != raw["pre_tokenizer"]
    for text in TEXTS:
        assert made.encode(text, add_special_tokens=False) == mistral.encode(text, add_special_tokens=False)
    raw["model"]["vocab"]["\u0100"], raw["model"]["vocab"]["\u0101"] = raw["model"]["vocab"]["\u0101"], raw["model"]["vocab"]["\u0100"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    other = Tokenizer.load(tmp_path, CONFIG)
    assert not other.warnings and json.loads(other.to_json())["pre_tokenizer"] == raw["pre_tokenizer"]


@pytest.mark.parametrize(("pre", "mended"), [("pixtral", True), ("llama-bpe", True), ("tekken", False), ("qwen2", False)])
def test_a_file_that_cuts_words_as_others_do_is_mended(mistral: Tokenizer, pre: str, mended: bool) -> None:
    metadata = tokenizer_metadata(mistral.source.parent, mistral, 4000) | {"tokenizer.ggml.pre": pre}
    read = read_vocabulary(GgufHeader(Path("m.gguf"), metadata, {}))
    assert read.pre == ("tekken" if mended else pre) and ("m.gguf has another pre-tokenizer" in "".join(read.remarks)) == mended
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"][:3], "[OTHER]", *metadata["tokenizer.ggml.tokens"][4:]]
    other = read_vocabulary(GgufHeader(Path("m.gguf"), metadata, {}))
    assert other.pre == pre and not other.remarks


def test_hunyuan_numbers_its_lines_itself(hunyuan: Tokenizer) -> None:
    count = len(ranks())
    assert hunyuan.encode("a<|eos|><|extra_204|>") == [ord("a"), count + 3, count + 209] and hunyuan.vocab_size == count + 210
    assert hunyuan.bos_id == count + 2 and count + 3 in hunyuan.stop_ids
    assert hunyuan.encode("e\u0301") == hunyuan.encode("é")
    for text in TEXTS:
        composed = unicodedata.normalize("NFC", text)
        assert hunyuan.encode(text) == expected(QWEN2_WORDS, composed) and hunyuan.decode(hunyuan.encode(text)) == composed
    parts = [*(said := hunyuan.reasoning([])).push("<think>so</think>\n<answer>\nyes\n</answer>"), *said.flush()]
    assert parts == [("thinking", "so"), ("answer", "yes")]


@pytest.mark.parametrize("name", ["tekken", "kimi-k2", "qwen2"])
def test_gguf_has_a_name_for_their_words(mistral: Tokenizer, kimi: Tokenizer, hunyuan: Tokenizer, name: str) -> None:
    made = {"tekken": mistral, "kimi-k2": kimi, "qwen2": hunyuan}[name]
    metadata = tokenizer_metadata(made.source.parent, made, 4000)
    assert metadata["tokenizer.ggml.pre"] == name
    again = backend(read_vocabulary(GgufHeader(made.source, metadata, {})))
    for text in TEXTS:
        text = unicodedata.normalize("NFC", text)  # which GGUF cannot ask for
        assert again.encode(text, add_special_tokens=False).ids == made.encode(text, add_special_tokens=False)


@pytest.mark.peer
def test_tiktoken_gives_the_same_ids(mistral: Tokenizer, kimi: Tokenizer) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    for made, pattern, first in ((mistral, TEKKEN_WORDS, SPECIAL), (kimi, KIMI.patterns[0], 0)):
        peer = tiktoken.Encoding("peer", pat_str=pattern, mergeable_ranks=ranks(), special_tokens={})
        for text in TEXTS:
            assert made.encode(text, add_special_tokens=False) == [first + token for token in peer.encode(text, disallowed_special=())]
