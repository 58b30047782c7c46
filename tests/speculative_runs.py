"""Generation with one engine, with and without speculative drafts."""

from effllm.runtime.engine import Engine, Step
from effllm.runtime.sampler import Sampler, SamplerSettings
from effllm.runtime.sampling.dry import breakers_of
from effllm.runtime.speculate import Speculation
from effllm.runtime.speculation.drafts import RecycledTokens, SuffixMatch
from effllm.runtime.tokenizer import Tokenizer

GREEDY = SamplerSettings(temperature=0)
REPEATS = "The fox was happy, and he ran to the river. " * 6


def answer(engine: Engine, prompt: list[int], tokens: int, settings: SamplerSettings = GREEDY) -> list[int]:
    for _ in engine.prefill(prompt):
        continue
    return [step.token for step in engine.generate(Sampler(settings, engine.config.vocab_size), tokens, frozenset())]


def both_ways(engine: Engine, tokenizer: Tokenizer, chosen: SamplerSettings, tokens: int, tells: int | None = None) -> list[list[Step]]:
    """Steps after a repetitive text; some of the drafts were accepted."""
    prompt, found = tokenizer.encode(REPEATS, add_special_tokens=False), []
    for drafts in (None, Speculation((SuffixMatch(), RecycledTokens()), clock=iter(range(10**6)).__next__)):
        engine.speculation = drafts
        engine.reset()
        for _ in engine.prefill(prompt):
            continue
        sampler = Sampler(chosen, engine.config.vocab_size, breakers_of(tokenizer, chosen))
        sampler.logprobs = tells
        found.append([*engine.generate(sampler, tokens, frozenset())])
    assert engine.speculation.counts.accepted > 0
    return found
