"""A draft head trained here for the packaged model: it guesses right where a random one never does, and as often at four bits."""

import random
import sys
from pathlib import Path

import pytest
import torch
from gguf_samples import FABLE
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from conversions import options, run
from speculative_runs import answer
from test_drafters import drafting
from test_speculation import GREEDY

import train_eagle3
from effllm.runtime.engine import open_engine
from effllm.runtime.prepare import EngineOptions

MINUTES = 1.0  # of one core


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """The folder of a head, and questions that it was not trained on."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    random.seed(1)
    try:
        model = AutoModelForCausalLM.from_pretrained(FABLE, dtype=torch.float32).eval().requires_grad_(False)
        tokenizer = AutoTokenizer.from_pretrained(FABLE)
        text = train_eagle3.answers(model, tokenizer, 64, 96)
        folder = tmp_path_factory.mktemp("head") / "fable-eagle3"
        train_eagle3.trained(model, text, MINUTES, (2, 3, 5), 2048).save(folder)
        asked = [tokenizer.apply_chat_template([{"role": "user", "content": each}], add_generation_prompt=True, tokenize=False)
                 for each in train_eagle3.prompts(4)]
        return folder, [tokenizer(each, add_special_tokens=False).input_ids for each in asked]
    finally:
        torch.set_num_threads(threads)


def right(model: Path, head: Path, prompts: list[list[int]], bits: int) -> float:
    """The share of right guesses in greedy answers, which are what they are without."""
    asked = EngineOptions(device="cpu", ctx=512, threads=2, draft=str(head))
    engine = list(open_engine(model, asked))[-1]
    for _ in engine.speculation.load():
        continue
    assert engine.prepared.speculation.draft_bits == bits
    found, with_drafts = [], drafting(engine)
    for speculation in (None, with_drafts):
        engine.speculation = speculation
        for prompt in prompts:
            engine.cache.truncate(0)
            engine.reset()
            found.append(answer(engine, prompt, 120, GREEDY))
    engine.close()
    assert found[: len(prompts)] == found[len(prompts) :]
    counts = with_drafts.counts
    print(f"{bits or 16} bits: {counts.accepted} of {counts.drafted} right, {counts.tokens_per_pass:.2f} tokens a pass")
    return counts.accepted / counts.drafted


@pytest.mark.slow
def test_a_trained_head_guesses_right_at_either_width(trained: tuple[Path, list[list[int]]], tmp_path: Path) -> None:
    folder, prompts = trained
    run(FABLE, tmp_path / "4bit", options("4bit"))
    wide, low = right(FABLE, folder, prompts, 0), right(tmp_path / "4bit", folder, prompts, 4)
    assert wide > 0.1, "a random one has none in a hundred"
    assert low > 0.6 * wide
