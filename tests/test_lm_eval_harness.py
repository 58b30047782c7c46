"""The model class for lm-evaluation-harness: with a base class of the same interface, and with the real one where it is installed."""

import abc
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import effllm
from effllm import EffllmError, UsageError
from effllm.runtime import harness

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
CONTEXT = "Once upon a time there was a fox who lived in"


@pytest.mark.peer
@pytest.mark.slow
def test_the_real_harness_loads_it():
    """First, because the tests below put modules of their own in the harness's place."""
    pytest.importorskip("lm_eval")
    from importlib import import_module

    harness.model_class.cache_clear()
    kind = harness.EffllmLM
    assert import_module("lm_eval.api.registry").get_model("effllm") is kind
    model = kind.create_from_arg_string(f"pretrained={FABLE},ctx=256", {"batch_size": 1, "device": None})
    instance = import_module("lm_eval.api.instance").Instance
    request = instance(request_type="loglikelihood", doc={}, arguments=(CONTEXT, " the wood."), idx=0)
    assert model.loglikelihood([request])[0][0] < 0
    model.engine.close()
    harness.model_class.cache_clear()


class Hook:
    def __init__(self):
        self.seen = []

    def add_partial(self, kind, args, answer):
        self.seen.append((kind, args, answer))


class LM(abc.ABC):
    """What the harness's class of this name demands and gives."""

    def __init__(self):
        self.cache_hook = Hook()

    @abc.abstractmethod
    def loglikelihood(self, requests): ...

    @abc.abstractmethod
    def loglikelihood_rolling(self, requests): ...

    @abc.abstractmethod
    def generate_until(self, requests): ...


@pytest.fixture(scope="module")
def registered():
    """Fake modules in the harness's place; what was registered."""
    names, found = ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.api.registry"), {}
    before = {name: sys.modules.get(name) for name in names}
    modules = {name: ModuleType(name) for name in names}
    modules["lm_eval.api.model"].LM = LM
    modules["lm_eval.api.registry"].register_model = lambda name: lambda kind: found.setdefault(name, kind)
    sys.modules.update(modules)
    harness.model_class.cache_clear()
    yield found
    harness.model_class.cache_clear()
    for name, module in before.items():
        sys.modules.pop(name)
        if module is not None:
            sys.modules[name] = module


@pytest.fixture(scope="module")
def lm(registered):
    kind = harness.EffllmLM
    assert registered == {"effllm": kind} and issubclass(kind, LM)
    lm = kind(pretrained=str(FABLE), kv="32bit", device="cpu", exact=True, batch_size="1", max_batch_size=None)
    yield lm
    lm.engine.close()


def requests(*args):
    return [SimpleNamespace(args=each) for each in args]


def reference(lm, context, target):
    """Log-probability and greediness by transformers in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    if not hasattr(reference, "model"):
        reference.model = AutoModelForCausalLM.from_pretrained(FABLE, dtype=torch.float32)
    with torch.no_grad():
        logits = reference.model(torch.tensor([[*context, *target][:-1]])).logits[0, len(context) - 1 :]
    scores = torch.log_softmax(logits.double(), -1)
    wanted = torch.tensor(target)
    return scores[torch.arange(len(target)), wanted].sum().item(), bool((scores.argmax(-1) == wanted).all())


def test_loglikelihood_is_transformers_and_in_order(lm):
    pairs = [(CONTEXT, " the wood."), (CONTEXT, " a castle near the sea."), ("", "Once upon a time"), (CONTEXT + " ", "the wood."),
             ("The king", " said to the fox: you have stolen my bread."), (CONTEXT, " the wood.")]
    answers = lm.loglikelihood(requests(*pairs))
    for (context, target), (score, greedy) in zip(pairs, answers):
        if context.endswith(" "):
            context, target = context[:-1], " " + target
        head = lm.text.encode(context) if context else [lm.begin]
        whole = lm.text.encode(context + target) if context else [lm.begin, *lm.text.encode(target)]
        assert whole[: len(head)] == head
        wanted, same = reference(lm, head, whole[len(head) :])
        assert score == pytest.approx(wanted, abs=2e-4) and greedy == same
    assert [answers[3][0], answers[5][0]] == pytest.approx([answers[0][0]] * 2, abs=1e-4)
    assert len(lm.cache_hook.seen) == len(pairs)


def test_a_context_of_spaces_is_none_and_hides_no_token(lm):
    spaced, plain = lm.loglikelihood(requests((" ", "a"), ("", " a")))
    assert spaced == plain and spaced[0] < 0


def test_an_answer_is_as_long_as_the_task_asks_where_the_context_holds_it(lm):
    lm.engine.reset()
    room = lm.engine.n_ctx - len(lm._prompt_ids(CONTEXT))
    asked = []
    generate = lm.engine.generate
    lm.engine.generate = lambda sampler, limit, stops: asked.append(limit) or generate(sampler, 1, stops)
    try:
        lm.generate_until(requests(*((text, {"until": [], "max_gen_toks": 100_000}) for text in (CONTEXT, CONTEXT * 500))))
    finally:
        del lm.engine.generate
    assert asked == [room, lm.engine.n_ctx - lm.engine.n_ctx // 2], "a long prompt keeps half of it"
    assert lm.generate_until(requests((CONTEXT, {"until": [], "max_gen_toks": 0}))) == [""]


def test_a_task_that_forbids_sampling_is_answered_greedily():
    assert harness.sampling_settings({"do_sample": False, "temperature": 0.9}).temperature == 0
    assert harness.sampling_settings({"temperature": 0.9}).temperature == 0.9
    assert harness.sampling_settings({"do_sample": True}).temperature == 1.0 and harness.sampling_settings({}).temperature == 0


def test_greedy_is_reported(lm):
    said = lm.generate_until(requests((CONTEXT, {"until": [], "max_gen_toks": 6})))[0]
    assert lm.loglikelihood(requests((CONTEXT, said), (CONTEXT, " xylophone")))[0][1] is True
    assert lm.loglikelihood(requests((CONTEXT, " xylophone")))[0][1] is False


def test_what_is_shared_is_run_once_and_changes_nothing(lm):
    first, second = (lm._pair(CONTEXT * 20, end) for end in (" the wood.", " the sea."))
    lm.engine.reset()
    alone = lm._scored(*second)
    lm.engine.reset()
    lm._scored(*first)
    ran = []
    forward = lm.engine._forward
    lm.engine._forward = lambda ids: ran.extend(ids) or forward(ids)
    try:
        score, greedy = lm._scored(*second)
    finally:
        del lm.engine._forward
    assert score == pytest.approx(alone[0], abs=1e-4) and greedy == alone[1], "rounding apart: few columns take another kernel"
    assert len(ran) < len(second[0]) // 2


def test_rolling_scores_every_token_once_after_as_many_as_fit():
    assert list(harness.rolling(range(10), 99, 4)) == [([99], [0, 1, 2, 3]), ([3], [4, 5, 6, 7]), ([5, 6, 7], [8, 9])]
    assert list(harness.rolling([], 99, 4)) == [] and list(harness.rolling([1], 99, 4)) == [([99], [1])]
    for length in range(1, 30):
        pairs = list(harness.rolling(range(length), 99, 5))
        assert [token for _, target in pairs for token in target] == list(range(length))
        assert all(len(context) + len(target) <= 6 for context, target in pairs)


def test_loglikelihood_rolling_is_the_sum(lm):
    text = "The fox bowed low, and asked to be allowed to think until the morning."
    ids = lm.text.encode(text)
    wanted, _ = reference(lm, [lm.begin], ids)
    assert lm.loglikelihood_rolling(requests((text,), ("",))) == [pytest.approx(wanted, abs=5e-4), 0]
    long = text * 200
    assert len(lm.text.encode(long)) > lm.engine.n_ctx
    assert np.isfinite(lm.loglikelihood_rolling(requests((long,)))[0])


def test_generate_until_stops_before_the_string_and_at_the_limit(lm):
    whole, = lm.generate_until(requests((CONTEXT, {"until": ["\x00never"], "max_gen_toks": 24})))
    assert len(lm.text.encode(whole)) in range(18, 30)
    stop = whole[10:14]
    cut, = lm.generate_until(requests((CONTEXT, {"until": [stop], "max_gen_toks": 24})))
    assert cut == whole.partition(stop)[0]
    one, = lm.generate_until(requests((CONTEXT, {"until": stop, "max_gen_toks": 24, "do_sample": False, "temperature": 0})))
    assert one == cut
    long, = lm.generate_until(requests((CONTEXT * 400, {"max_gen_toks": 5})))
    assert long, "a context that is too long keeps its end"


def test_settings_of_a_task():
    assert harness.sampling_settings({"until": ["\n"]}).temperature == 0
    sampled = harness.sampling_settings({"do_sample": True, "temperature": 0.7, "top_p": 0.9})
    assert (sampled.temperature, sampled.top_p, sampled.top_k) == (0.7, 0.9, 0)


def test_a_chat_is_rendered_by_the_model_s_template(lm):
    assert "Hello" in lm.apply_chat_template([{"role": "user", "content": "Hello"}])
    assert lm.chat_template(True) == lm.text.template.source and lm.chat_template(False) == "" and lm.tokenizer_name


def test_unknown_arguments_are_refused(lm):
    with pytest.raises(UsageError, match="temperatur"):
        harness.EffllmLM(pretrained="fable", temperatur=1)


def test_without_the_harness_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "lm_eval.api.model", raising=False)
    harness.model_class.cache_clear()
    with pytest.raises(EffllmError, match="not installed") as caught:
        _ = harness.EffllmLM
    assert "effllm[eval]" in caught.value.hint
    harness.model_class.cache_clear()
