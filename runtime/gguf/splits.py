"""How byte-level vocabularies cut a text before merging: the name that a GGUF file gives its cutter, and the cutter.

Each entry is a chain of patterns; each cuts what the one before it has left whole, into matches and what lies between them. They are the
patterns that the models were trained with.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
ENDINGS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
REST_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BEFORE = r"[^\r\n\p{L}\p{N}]?"
HAN = r"[一-龥ࠀ-一가-퟿]+"  # and kana and hangul, as the models' authors drew the range
# Cased letters as the model's authors listed them; escapes where another spelling of a character is meant.
LETTERS = "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"  # noqa: E501


@dataclass(frozen=True)
class Cutter:
    """`whole`: a piece that is a token as it stands is not merged from its bytes; `bos`: a text begins with the begin token by default."""

    patterns: tuple[str, ...]
    whole: bool = False
    bos: bool = False


GPT2 = Cutter((WORDS,))
LLAMA3 = Cutter((rf"{ENDINGS}|{BEFORE}\p{{L}}+|\p{{N}}{{1,3}}|{REST}",), whole=True, bos=True)
QWEN35 = Cutter((rf"{ENDINGS}|{BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",))
QWEN2 = Cutter((rf"{ENDINGS}|{BEFORE}\p{{L}}+|\p{{N}}|{REST}",))
DIGITS = Cutter((r"\p{N}", WORDS))
KANA = "[一-龥\u3040-\u309f\u30a0-\u30ff]+"  # and the usual Han characters
MARKED = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""  # a mark before letters is theirs
DEEPSEEK3 = Cutter((r"\p{N}{1,3}", KANA, rf"{MARKED}| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"))
CUTTERS = {
    "default": Cutter((r"[\p{P}\$\+<=>\^~\|]+", WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "deepseek-coder": Cutter((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN, r"\p{N}")),
    "deepseek-llm": Cutter((r"[\r\n]", rf"\s?[{LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", HAN, r"\p{N}+")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), DEEPSEEK3),
    "falcon": Cutter((r"[\p{P}\$\+<=>\^~\|`]+", WORDS, r"[0-9][0-9][0-9]")),
    "gpt-4o": Cutter((rf"{BEFORE}{UPPER}*{LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|{BEFORE}{UPPER}+{LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
                      rf"|\p{{N}}{{1,3}}|{REST_SLASH}",)),
    "qwen35": QWEN35,
    "seed-coder": Cutter((rf"{ENDINGS}|{BEFORE}\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",)),
    "tekken": Cutter((rf"{BEFORE}{UPPER}*{LOWER}+|{BEFORE}{UPPER}+{LOWER}*|\p{{N}}|{REST_SLASH}",), whole=True, bos=True),
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "phi-2", "jais", "trillion", "granite-docling", "exaone4"), GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx", "chatglm-bpe", "glm4"), Cutter(LLAMA3.patterns)),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "hunyuan"), QWEN2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), DIGITS),
}


def pre_tokenizer(patterns: tuple[str, ...]) -> pre_tokenizers.PreTokenizer:
    """The chain of patterns, then bytes as the characters that byte-level vocabularies write for them."""
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
