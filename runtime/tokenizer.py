"""The tokenizer of a model folder: encoding, streaming detokenization, chat templates, and end-of-turn tokens.

`tokens/tokenizer_files.py` reads the files. The engine knows only token ids; everything about text is here. A character may span several
tokens, so `TextStream` emits it when its last byte has come.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from ..offload.safetensors_header import is_gguf
from .images import model_type_of
from .images.media import text_ids
from .templates.builtin_templates import BUILTIN_TEMPLATES
from .templates.template import ChatTemplate, TemplateError, load_template
from .tokens.chunked_encoding import encode_in_chunks, exhaust
from .tokens.reasoning import (
    ANSWER_TAG_VOCABULARIES,
    ANSWER_TAGS,
    TEMPLATE_ONLY_TAGS,
    THINK_TAGS,
    TOOL_CALL_TOKENS,
    ChannelFilter,
    ThinkFilter,
    ThinkTags,
)
from .tokens.text_stream import Decoder, TextStream
from .tokens.tokenizer_files import (
    REFETCH,
    TokenizerError,
    as_tokenizer_error,
    open_backend,
    open_vocabulary_file,
    read_json,
    special_tokens,
    token_ids,
)

if TYPE_CHECKING:
    from .config import ModelConfig

END_OF_TURN = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<turn|>",
               "<|end_of_turn|>", "<|END_OF_TURN_TOKEN|>", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<|eos|>", "<eos>",
               "<EOT>", "<|eot|>", "[EOT]", "[EOS]", "[e~[", "[|endofturn|]", "<seed:eos>", "<|end_of_sentence|>", "<|tool_response>",
               "<|assistant_end|>")
END_TAG = "</s>"  # ends a turn in many vocabularies; in others it is a word of HTML
REASONING_SWITCHES = ("enable_thinking", "thinking", "reasoning")  # template variables that switch reasoning on and off
WITHOUT_REASONING = "this model does not reason"
NOTHING_TO_LIMIT = f"--reasoning-budget has no effect: {WITHOUT_REASONING}"
NO_THINK = "/no_think"  # in the system prompt, switches reasoning off in models without such a variable
# Ids of a special token and of two bytes that identify Mistral's vocabulary. The first conversions of Mistral Small 3.1 and Pixtral have
# Llama 3's pre-tokenizer pattern.
TEKKEN_PROBES = {3: "[INST]", 1000: "\u0100", 1032: "\u0120"}
TEKKEN_WARNING = "{} has another pre-tokenizer than Mistral's models were trained with; Mistral's is used"
# Model types whose texts all begin with BOS (EOS in a vocabulary without BOS), which only the code of their processor says.
ALWAYS_BOS_FAMILIES = ("molmo2",)
# with all three in the vocabulary, <|end|> closes a message and the turn goes on
HARMONY_TOKENS = ("<|channel|>", "<|return|>", "<|call|>")


class Tokenizer:
    """Tokenizer and chat template of a model. Open one with `Tokenizer.load`."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        add_bos: bool,
        bos_id: int | None,
        embedding_rows: int,
        eos_ids: Iterable[int],
        template: ChatTemplate | None,
        source: Path,
        warnings: Sequence[str] = (),
    ) -> None:
        self._decoder = Decoder(backend)
        self._backend, self._add_bos, self._embedding_rows, self._eos_ids = backend, add_bos, embedding_rows, tuple(eos_ids)
        self.special_tokens = dict(special_tokens)  # role ("bos_token") -> text
        self.bos_id = bos_id
        self.template = template
        self.source = source
        self.text_prefix = ""  # every chat prompt begins with it, whatever the template says
        self.warnings = tuple(warnings)  # about files that were read otherwise than they state

    @classmethod
    def load(cls, folder: Path, config: "ModelConfig") -> "Tokenizer":
        """Read the tokenizer of a model folder or GGUF file. Raises ModelNotFound (none is there), TokenizerError, TemplateError."""
        if is_gguf(folder):
            from .gguf.tokenizer import load_tokenizer

            return load_tokenizer(folder, config.vocab_size)
        settings = read_json(folder / "tokenizer_config.json")
        special = special_tokens(read_json(folder / "special_tokens_map.json")) | special_tokens(settings)
        eos = [*config.eos_token_ids, *token_ids(read_json(folder / "generation_config.json").get("eos_token_id"))]
        if (vocabulary_file := open_vocabulary_file(folder, settings)) is None:
            path = folder / "tokenizer.json"
            backend, warnings, version_template = open_backend(path), [], None
            if is_mistral_vocabulary(backend.token_to_id):
                from .tokens.tiktoken_vocabulary import fix_mistral_pattern  # takes as long to import as this module

                warnings += [TEKKEN_WARNING.format(path.name)] if fix_mistral_pattern(backend) else []
        else:
            path, backend, warnings, version_template = vocabulary_file.path, vocabulary_file.backend, [], vocabulary_file.template
            special = vocabulary_file.special | special
            eos += vocabulary_file.ends
        template = load_template(folder, settings, special)
        if template is None and version_template is not None:
            template = version_template
            warnings.append(f"there is no chat template: using that of {path.name}'s version")
        if template is None and (source := BUILTIN_TEMPLATES.get(model_type_of(folder))) is not None:
            template = ChatTemplate(source, special)
        bos = special.get("bos_token")
        bos_id = backend.token_to_id(bos) if bos is not None else config.bos_token_id
        # The post-processor of tokenizer.json already implements `add_bos_token`; the flag counts only where there is none.
        add_bos = settings.get("add_bos_token", vocabulary_file is not None
                               and vocabulary_file.add_bos) is True and backend.post_processor is None
        tokenizer = cls(backend, special, add_bos, bos_id, config.vocab_size + config.extra_embeddings, eos, template, path, warnings)
        if model_type_of(folder) in ALWAYS_BOS_FAMILIES and (bos_text := bos or special.get("eos_token")) is not None:
            tokenizer.text_prefix, tokenizer.bos_id, tokenizer._add_bos = bos_text, backend.token_to_id(bos_text), True
        return tokenizer

    def to_json(self) -> str:
        """The vocabulary as a tokenizer.json."""
        return self._backend.to_str()

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary with added tokens (the embedding may have more rows, for padding)."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def vocabulary(self) -> dict[str, int]:
        """Token text -> id, added tokens included."""
        return self._backend.get_vocab(with_added_tokens=True)

    def base_tokens(self) -> dict[int, str]:
        """Id -> text of the base vocabulary, without added tokens, which a fine-tune may rename."""
        return {number: token for token, number in self.vocabulary().items() if token not in self.added}

    @cached_property
    def added(self) -> dict[str, int]:
        """Text -> id of the added tokens."""
        return {token.content: number for number, token in self._backend.get_added_tokens_decoder().items()}

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end the model's turn, from every file that states one, and known end-of-turn tokens among the added ones."""
        added = self.added
        names = [name for name in END_OF_TURN if name in added and self._ends_turn(name)]
        eos = self._backend.token_to_id(self.special_tokens.get("eos_token", ""))
        ends = {added[name] for name in names}.union(self._eos_ids, () if eos is None else (eos,))
        end_tag = added.get(END_TAG)
        return frozenset(ends if end_tag is None or ends and not self._backend.get_added_tokens_decoder()[end_tag].special
                         else {*ends, end_tag})

    def _ends_turn(self, name: str) -> bool:
        return name != "<|end|>" or not self.channels

    @cached_property
    def channels(self) -> bool:
        """Whether a turn consists of several messages, reasoning on its own channel: the harmony format."""
        return all(name in self.added for name in HARMONY_TOKENS)

    @cached_property
    def thinks(self) -> bool:
        """Whether the model may reason before it answers, on a channel or between tags."""
        return self.channels or self.think_tags is not None

    @cached_property
    def think_tags(self) -> ThinkTags | None:
        """The tags around reasoning, None if there are none."""
        template = "" if self.template is None else self.template.source
        return next((tags for tags in THINK_TAGS if (mark := tags.tokens[0]) in template
                     or mark not in TEMPLATE_ONLY_TAGS and self._backend.token_to_id(tags.vocabulary_token or mark) is not None), None)

    @cached_property
    def _visible_tokens(self) -> dict[int, str]:
        """Token -> text where decoding would do otherwise: think tags and channel markers are kept though they are special tokens, because
        they separate reasoning from content; tool-call markers that are not special decode to nothing.
        """
        added, tags = self._backend.get_added_tokens_decoder(), self.think_tags
        marks = ChannelFilter.MARKERS if self.channels else () if tags is None else tags.tokens
        shown = {number: token.content for number, token in added.items() if token.special and token.content in marks}
        return shown | {number: "" for number, token in added.items() if not token.special and token.content in TOOL_CALL_TOKENS}

    def unsupported_think(self, think: str) -> str:
        """Why switching reasoning "on" or "off" has no effect; empty if it may have."""
        if think == "on" and not self.thinks:
            return WITHOUT_REASONING
        tags = self.think_tags
        if think != "off" or tags is None or self.channels or self.template is None:
            return ""
        has_switch = self._reasoning_switches or self.no_think or "enable_thinking" not in tags.disable_options
        return "" if has_switch else "this model's chat template has no switch for it"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written in it are recognised. BOS is added once, if the model wants it. Raises
        TokenizerError for an id beyond the model's embedding."""
        return exhaust(self.encoding(text, add_special_tokens))

    @cached_property
    def without_special_tokens(self) -> "Tokenizer":
        """The same tokenizer, except that special tokens written in a text are encoded as plain text."""
        other = copy(self)
        other._backend = tokenizers.Tokenizer.from_str(self.to_json())
        other._backend.encode_special_tokens = True
        return other

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """(token ids, segment ids) of a pair of texts. Raises TokenizerError."""
        try:
            encoding = self._backend.encode(*(each.encode("utf-8", "replace").decode() for each in (first, second)))
        except BaseException as error:
            raise as_tokenizer_error(error, f"{self.source} cannot tokenize the texts") from None
        return self._within_rows(encoding.ids), encoding.type_ids

    def encoding(self, text: str, add_special_tokens: bool = True) -> Generator[int, None, list[int]]:
        """`encode` of a long text: yields the number of characters done."""
        ids = yield from self._encoding(text, add_special_tokens)
        if add_special_tokens and self.bos_id is not None:
            if self._add_bos and ids[:1] != [self.bos_id]:
                ids.insert(0, self.bos_id)
            elif ids[:2] == [self.bos_id, self.bos_id]:
                del ids[0]
        return ids

    def _encoding(self, text: str, add_special_tokens: bool) -> Generator[int, None, list[int]]:
        text = text.encode("utf-8", "replace").decode() if not text.isascii() else text  # a lone surrogate has no UTF-8
        try:
            ids = yield from encode_in_chunks(self._backend, text, add_special_tokens)
        except BaseException as error:
            raise as_tokenizer_error(error, f"{self.source} cannot tokenize the text") from None
        return self._within_rows(ids)

    def _within_rows(self, ids: list[int]) -> list[int]:
        if ids and max(ids) >= self._embedding_rows:
            raise TokenizerError(
                f"{self.source} makes token {max(ids)}, but the model has only {self._embedding_rows} embedding rows",
                f"{REFETCH}: the two do not match",
            )
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        ids = text_ids(ids)
        if skip_special_tokens and self._visible_tokens and not self._visible_tokens.keys().isdisjoint(ids):
            stream = self.stream()
            return "".join(map(stream.push, ids)) + stream.flush()
        return self._decoder(ids, skip_special_tokens)

    def stream(self, context: Sequence[int] = (), visible: Mapping[int, str] | None = None) -> TextStream:
        """A detokenizer for one answer.

        `context`: the tokens before it, for a raw completion, where the first chunk may begin with a space.
        `visible`: further special tokens to be emitted as text.
        """
        return TextStream(self._decoder, text_ids(context[-16:]), {**self._visible_tokens, **(visible or {})})

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt text of a chat. Raises TemplateError, also if the model has no template."""
        if self.template is None:
            raise TemplateError("this is a base model: it has no chat template", 'let it continue a text: effllm run MODEL --raw "…"')
        text = self.template.render(messages, **options)
        return text if text.startswith(self.text_prefix) else self.text_prefix + text

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of a chat: the template writes all special tokens itself, so none is added."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    def reasoning(self, prompt: Sequence[int], emits_calls: bool = False) -> ThinkFilter | ChannelFilter | None:
        """The parser that separates reasoning from content after a prompt, None if the model does not reason. `emits_calls`: tool calls are
        emitted as text.
        """
        if self.channels:
            return ChannelFilter(self.decode(prompt[-64:], skip_special_tokens=False), emits_calls)
        tags = self.think_tags
        return None if tags is None else ThinkFilter(tags.open, tags.close, self.opens_thinking(prompt), self._answer_tags)

    @cached_property
    def _answer_tags(self) -> list[tuple[str, str]]:
        """Tags that may surround the answer, in the template or the vocabulary."""
        template = "" if self.template is None else self.template.source
        if self.think_tags is not None and self.think_tags.answer_end:
            return [("", self.think_tags.answer_end)]
        return [(open, close) for open, close in ANSWER_TAGS if open in template
                or any(self._backend.token_to_id(mark) is not None for mark in (open, *ANSWER_TAG_VOCABULARIES.get(open, ())))]

    def thinking(self, on: bool) -> dict[str, object]:
        """Template variables that switch reasoning on or off: the model's switch, or an effort."""
        if self.channels:
            return {"reasoning_effort": "high" if on else "low"}
        off = {} if on or self.think_tags is None else self.think_tags.disable_options
        return {"enable_thinking": on, **dict.fromkeys(self._reasoning_switches, on), **off}

    @cached_property
    def _reasoning_switches(self) -> list[str]:
        names = frozenset() if self.template is None else self.template.variables
        return [name for name in REASONING_SWITCHES if name in names]

    @property
    def no_think(self) -> str:
        """What the system prompt must say to switch reasoning off, empty if the template has a switch."""
        return NO_THINK if not self._reasoning_switches and self.template is not None and NO_THINK in self.template.source else ""

    def opens_thinking(self, prompt: Sequence[int]) -> bool:
        """Whether the prompt ends with an open think tag, so that the answer begins inside the reasoning."""
        return self.think_tags is not None and self.think_tags.opened_by(self.decode(prompt[-64:], skip_special_tokens=False))


def is_mistral_vocabulary(token_to_id: Callable[[str], int | None]) -> bool:
    """Whether a vocabulary, given as a lookup of token ids, is Mistral's."""
    return all(token_to_id(text) == token_id for token_id, text in TEKKEN_PROBES.items())
