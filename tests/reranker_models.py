"""Reranking models for tests: the packaged model with the files that sentence-transformers writes next to such models."""

import json
from pathlib import Path

import torch
from packaged_embedder import FABLE
from transformers import AutoModelForCausalLM

WORDS = (" yes", " no")
TEMPLATE = ("{%- set said = messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first | default('Say it.') -%}"
            "{%- set query = messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first -%}"
            "{%- set document = messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first -%}"
            "<|user|>\n{{ said }}\nAsked: {{ query }}\nTold: {{ document }}<|end|><|assistant|>\n\n")  # of the last two Jinja leaves one
MODULES = [{"type": f"sentence_transformers.{kind}", "path": path} for kind, path in
           (("base.modules.transformer.Transformer", ""), ("cross_encoder.modules.logit_score.LogitScore", "1_LogitScore"))]


def ranker(folder: Path, words: object, modules: object = MODULES, template: str = TEMPLATE) -> Path:
    """The packaged model turned into a reranker; `words` is what its LogitScore says of tokens."""
    (folder / "1_LogitScore").mkdir(parents=True)
    for path in FABLE.iterdir():
        if path.name != "tokenizer_config.json":
            (folder / path.name).symlink_to(path)
    settings = json.loads((FABLE / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(words))
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


def prompt(query: str, document: str, said: str = "Say it.") -> str:
    return f"<|user|>\n{said}\nAsked: {query}\nTold: {document}<|end|><|assistant|>\n"


def expected(ids: list[int], yes: int, no: int) -> float:
    """transformers' probability of yes after token ids, against no, in float64."""
    model = AutoModelForCausalLM.from_pretrained(FABLE, dtype=torch.float64)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
    return float(torch.softmax(logits[[yes, no]], 0)[0])
