"""Complaints about quantized caches elsewhere (`test_complaints.py`): where they run, quality, separate formats for keys and values."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import running
from hub_user import FABLE, HubUser

from effllm.kernels.cpu import attention_decode
from effllm.kernels.cpu.jobs import Jobs
from effllm.kernels.cpu.kv import decode, merge, prefill
from effllm.kernels.cpu.pages import LayerPages
from effllm.runtime.engine import open_engine
from effllm.runtime.measuring.recall import recall
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.sampler import Sampler, SamplerSettings
from effllm.runtime.tokenizer import Tokenizer

PROSE = (FABLE.parent.parent / "runtime" / "calibration.txt").read_text(encoding="utf-8")


@pytest.fixture
def user(tmp_path: Path) -> Iterator[HubUser]:
    with running() as hub:
        yield HubUser(tmp_path, hub.endpoint)


@pytest.mark.parametrize("kv", ["4bit", "k8v4"])
def test_llamacpp_28455_a_packed_cache_stays_where_the_layers_are_and_in_its_kernels(monkeypatch: pytest.MonkeyPatch, kv: str) -> None:
    """(#27109, #24485; lmstudio#2246) The same layers on the same device, packed pages multiplied as they lie; nothing is widened by the
    way that serves where no kernel does."""
    def fails(*words: object, **more: object) -> None:
        raise AssertionError("the slow way of attention ran")

    ran = set()
    real = Jobs.run

    def run(self: Jobs, kernel: object, *words: object, **more: object) -> object:
        ran.add(kernel)
        return real(self, kernel, *words, **more)

    monkeypatch.setattr(LayerPages, "reference", fails)
    monkeypatch.setattr(Jobs, "run", run)
    placed, slow = {}, set()
    for each in ("16bit", kv):
        ran.clear()
        *_, engine = open_engine(FABLE, EngineOptions(device="cpu", ctx=768, kv=each))
        try:
            for _ in engine.prefill([1 + (31 * i) % 4000 for i in range(600)]):
                continue
            list(engine.generate(Sampler(SamplerSettings(temperature=0.0), engine.config.vocab_size), 4, frozenset()))
            placed[each] = engine.placement.devices
            slow |= {text for text in engine.announcements() if "attend" in text}
            assert (engine.cache.sealed > 0) and engine.cache.exact_tokens < 600 or each == "16bit"
        finally:
            engine.close()
        packed = {decode.attend_packed_decode, prefill.attend_packed_prefill, merge.merge_packed}
        assert attention_decode.attend_decode in ran and (packed <= ran if each == kv else not packed & ran)
    assert placed[kv] == placed["16bit"] and len(placed[kv]) and not slow


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["4bit", "k8v4"])
def test_minimal_ai_18_a_packed_cache_finds_what_was_said_far_back(kv: str) -> None:
    """(FreeToken#268, lmstudio#1740) As much as an exact one, over a context that is packed but for its ends."""
    pair = [list(open_engine(FABLE, EngineOptions(device="cpu", ctx=1024, kv=each)))[-1] for each in (kv, "32bit")]
    try:
        result = list(recall(*pair, Tokenizer.load(FABLE, pair[0].config), PROSE, 1024, samples=2))[-1]
    finally:
        for engine in pair:
            engine.close()
    far = result.rows[0]
    assert far.spread == 0.3 and far.tokens > 20 and far.right_exact > 0.9, far
    assert far.right == far.right_exact and result.packed_bits < (5 if kv == "4bit" else 7)


def test_ollama_10794_keys_and_values_have_widths_of_their_own(user: HubUser) -> None:
    """(#16245) By one name or by llama.cpp's two flags, whatever the order; what is reported is what was asked for."""
    def typed(*flags: str) -> dict:
        ran = user.run("run", "fable", PROSE[:2200], "--raw", "-c", "1024", "-n", "2", "--temp", "0", "--json", *flags).json
        return {"bits": ran["memory"]["packed_bits"], "text": ran["text"]}

    apart, turned = typed("--kv", "k8v4"), typed("--kv", "k4v8")
    assert typed("-ctk", "q8_0", "-ctv", "q4_0") == apart and typed("--cache-type-v", "q8_0", "--cache-type-k", "q4_0") == turned
    one, other = (typed("--kv", kv)["bits"] for kv in ("4bit", "8bit"))
    assert one < apart["bits"] < other and one < turned["bits"] < other
    assert apart["bits"] + turned["bits"] == one + other, "the widths of keys and of values add up"
    assert "k8v4" in user.run("run", "fable", "Hi", "--kv", "k8").refused(2)
