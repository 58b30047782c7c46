"""Pre-tokenizers of byte-level vocabularies, by the name that GGUF files use (`tokenizer.ggml.pre`).

Each is a chain of patterns, applied in order to the pieces that the previous one left whole, splitting them into matches and the text
between. They are the patterns the models were trained with.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SYMBOLS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PREFIX = r"[^\r\n\p{L}\p{N}]?"
HAN = r"[一-龥ࠀ-一가-퟿]+"  # and kana and hangul; the range is that of the models' authors
# Cased letters as the model's authors listed them; escaped where another code point looks the same.
LETTERS = "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"  # noqa: E501


@dataclass(frozen=True)
class Splitter:
    """The pre-tokenizer of a vocabulary."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a piece that is a token is not merged from its bytes
    bos: bool = False  # a text begins with the begin token by default


LLAMA3_WORDS = rf"{CONTRACTIONS}|{PREFIX}\p{{L}}+|\p{{N}}{{1,3}}|{SYMBOLS}"
QWEN2_WORDS = rf"{CONTRACTIONS}|{PREFIX}\p{{L}}+|\p{{N}}|{SYMBOLS}"
GPT2 = Splitter((WORDS,))
LLAMA3 = Splitter((LLAMA3_WORDS,), ignore_merges=True, bos=True)
QWEN35 = Splitter((rf"{CONTRACTIONS}|{PREFIX}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",))
QWEN2 = Splitter((QWEN2_WORDS,))
DIGITS = Splitter((r"\p{N}", WORDS))
ANY_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O_WORDS = rf"{PREFIX}{UPPER}*{LOWER}+{ANY_CONTRACTION}|{PREFIX}{UPPER}+{LOWER}*{ANY_CONTRACTION}|\p{{N}}{{1,3}}|{SYMBOLS_SLASH}"
GPT4O = Splitter((GPT4O_WORDS,))
KANA = "[一-龥\u3040-\u309f\u30a0-\u30ff]+"  # and the usual Han characters
MARK_LETTERS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""  # with a mark before letters
DEEPSEEK3_WORDS = rf"{MARK_LETTERS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DEEPSEEK3 = Splitter((r"\p{N}{1,3}", KANA, DEEPSEEK3_WORDS))
# Han, kana, Thai from its leading vowels on, Lao, Khmer, Burmese and hangul: scripts with few spaces between words, or none.
UNSPACED = ("[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff"
            "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+")
THOUSANDS = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"  # digits in threes, counted from the end
CLAUSES = r" ?[^(\s|.,!?…。，、।۔،)]+"
# Cased letters without Han characters, which the first alternative splits off.
KIMI_UPPER, KIMI_LOWER = (rf"{kind[:-1]}&&[^\p{{Han}}]]" for kind in (UPPER, LOWER))
KIMI = Splitter((rf"[\p{{Han}}]+|{PREFIX}{KIMI_UPPER}*{KIMI_LOWER}+{ANY_CONTRACTION}|{PREFIX}{KIMI_UPPER}+{KIMI_LOWER}*{ANY_CONTRACTION}"
               rf"|\p{{N}}{{1,3}}|{SYMBOLS}",), ignore_merges=True)
BLANK_RUNS = "|".join(rf"\s{{{1 << power}}}(?!\S)" for power in range(9, 1, -1))  # blanks in runs of 512, 256, … 4
YOUTU_ASIA = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + KANA
SPLITTERS = {
    "afmoe": Splitter((THOUSANDS, UNSPACED, DEEPSEEK3_WORDS)),
    "default": Splitter((r"[\p{P}\$\+<=>\^~\|]+", WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "chameleon": Splitter((r"<sentinel:[0-9]+>", r"IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", WORDS),
                          bos=True),
    "deepseek-coder": Splitter((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN, r"\p{N}")),
    "deepseek-llm": Splitter((r"[\r\n]", rf"\s?[{LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", HAN, r"\p{N}+")),
    "exaone-moe": Splitter((rf"{CONTRACTIONS}|{PREFIX}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+"
                            r"[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",)),
    "falcon": Splitter((r"[\p{P}\$\+<=>\^~\|`]+", WORDS, r"[0-9][0-9][0-9]")),
    "granite-embed-multi-97m": Splitter(GPT4O.patterns, ignore_merges=True),
    "jais-2": Splitter((rf"{CONTRACTIONS}|{PREFIX}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
                        rf"|{BLANK_RUNS}|\s{{1,2}}(?!\S)|\s",)),
    "kimi-k2": KIMI,
    "laguna": Splitter((r"[^\n]+|\n+", QWEN2_WORDS)),
    "minicpm5": Splitter((r"\p{N}{1,3}", LLAMA3_WORDS.replace("{1,3}", "+")), ignore_merges=True),
    "qwen35": QWEN35,
    "seed-coder": Splitter((rf"{CONTRACTIONS}|{PREFIX}\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",)),
    "spark2_5": Splitter((r"\p{N}{1,3}", KANA, rf"{MARK_LETTERS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")),
    "superbpe": Splitter((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "tekken": Splitter((rf"{PREFIX}{UPPER}*{LOWER}+|{PREFIX}{UPPER}+{LOWER}*|\p{{N}}|{SYMBOLS_SLASH}",), ignore_merges=True, bos=True),
    "ufakzeka": Splitter((rf"{PREFIX}\p{{L}}+|\p{{N}}|{SYMBOLS}",)),
    "viking": Splitter((CLAUSES, r"\p{N}")),
    "youtu": Splitter((YOUTU_ASIA, GPT4O_WORDS.replace("{1,3}", "")), ignore_merges=True),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), Splitter((
        rf"'(?i:[sdmt]|ll|ve|re)|{PREFIX}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",))),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), Splitter((CLAUSES,))),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), Splitter((r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O_WORDS))),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), DEEPSEEK3),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), GPT4O),
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "phi-2", "jais", "trillion", "granite-docling", "exaone4", "gigachat", "a.x-4.0", "mellum",
                     "modern-bert", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v1-en", "jina-v2-code", "roberta-bpe"), GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"), LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx", "chatglm-bpe", "glm4", "glm5"), Splitter(LLAMA3.patterns)),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "hunyuan", "kormo", "megrez", "grok-2", "solar-open", "f2llmv2"), QWEN2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"), DIGITS),
}


def same_pattern(pattern: str) -> str:
    """A pattern in one canonical spelling."""
    return pattern.replace(CONTRACTIONS, "(?i:'s|'t|'re|'ve|'m|'ll|'d)").replace("\r", r"\r").replace("\n", r"\n")


def pre_tokenizer(patterns: tuple[str, ...]) -> pre_tokenizers.PreTokenizer:
    """A chain of patterns, then the mapping of bytes to the characters of byte-level vocabularies."""
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
