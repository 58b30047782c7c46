"""Small random models with sparse attention (token selection by an indexer) for tests, and an oracle that uses our selections once it has
verified that they are among the best."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
from family_models import CASES, Case, oracle
from transformers import PreTrainedModel

from effllm.kernels.cpu.indexer import LayerIndex
from effllm.runtime.engine import Engine

MAX_SCORE_GAP = 1e-3  # relative to a query's score deviation: tokens this close may be exchanged
CALM = {"hidden_size": 128, "initializer_range": 0.08, "max_position_embeddings": 640, "q_lora_rank": 64, "kv_lora_rank": 64,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "moe_intermediate_size": 64, "intermediate_size": 192}
MODELS = {"deepseek_v32": Case("deepseek_v32", {**CASES["deepseek_v32"].changes, **CALM, "index_topk": 70}),
          "glm_moe_dsa": Case("glm_moe_dsa", {**CASES["glm_moe_dsa"].changes, **CALM, "index_topk": 150, "num_hidden_layers": 4,
                                              "indexer_types": ["full", "shared", "full", "shared"]}),
          "axk2": Case("axk2", {**CASES["axk2"].changes, **CALM, "index_topk": 70, "vocab_size": 300}),
          "hy_v4": Case("hy_v4", {**CASES["hy_v4"].changes, **CALM, "index_topk": 70, "vocab_size": 300, "num_hidden_layers": 4,
                                  "indexer_types": ["full", "full", "shared", "shared"]}),
          "mistral_large4": Case("mistral_large4_text", {
                **CASES["mistral_large4"].changes, **{key: value for key, value in CALM.items() if key != "q_lora_rank"},
                "index_topk": 70, "num_hidden_layers": 5, "no_rope_layers": [1, 0, 1, 0, 1], "kv_source_layers": [0, 1, 0, 1, 4],
                "indexer_types": ["full", "shared", "full", "full", "shared"]}, inside="mistral_large4"),
          "minimax_m3": Case("minimax_m3_vl_text", {
                **CASES["minimax_m3_vl_text"].changes, "hidden_size": 128, "initializer_range": 0.08, "max_position_embeddings": 640,
                "dense_intermediate_size": 192, "index_topk_blocks": 4, "index_block_size": 16})}
SLOW_MODELS = ("axk2", "hy_v4", "mistral_large4")  # run only with the slow tests: others cover the same paths


@contextmanager
def recorded_selections(engine: Engine) -> Iterator[list[dict[int, np.ndarray]]]:
    """What each selecting layer selected, by token position, int [groups, chosen]."""
    indexes = [layer_index for layer_index in engine.cache.indexes if isinstance(layer_index, LayerIndex)]
    selections = [{} for _ in indexes]

    def record(number: int, index: object, q: np.ndarray, weights: np.ndarray | None, position: int, out: np.ndarray) -> None:
        originals[number](index, q, weights, position, out)
        index.ops.flush()  # and keep the pass from being recorded
        for row, units in enumerate(out.copy()):
            selections[number][position + row] = units.reshape(index.shape.groups, -1)

    originals = [index._choose for index in indexes]
    for number, index in enumerate(indexes):
        index._choose = lambda *arguments, number=number: record(number, *arguments)
    try:
        yield selections
    finally:
        for index, original in zip(indexes, originals, strict=True):
            index._choose = original


def oracle_with_selections(model: PreTrainedModel, ids: list[int], chosen: list[dict[int, np.ndarray]]) -> tuple[np.ndarray, int]:
    """The oracle's logits where its indexers choose as ours did, and how many choices that were. Asserts that those are among the best."""
    remaining, num_selections = iter(chosen), 0

    def choose(scores: torch.Tensor, count: int, dim: int) -> SimpleNamespace:
        nonlocal num_selections
        best_of_all = usual(scores, count, dim=dim)
        indices = best_of_all.indices.clone()
        for position, units in next(remaining).items():
            row_scores = scores[0, position] if scores.ndim == 3 else scores[0, :, position]  # one choice, or one a head
            row_scores, best = row_scores.reshape(-1, row_scores.shape[-1]), best_of_all.values[0, ..., position, :].reshape(-1, count)
            assert units.shape == best.shape and all(len(set(row)) == count for row in units.tolist())
            selected_scores = row_scores.gather(1, torch.from_numpy(units.astype(np.int64)))
            spread = row_scores[torch.isfinite(row_scores)].std()
            worst = best.clamp(max=1e30).min(1).values - selected_scores.clamp(max=1e30).min(1).values
            assert (worst <= MAX_SCORE_GAP * spread).all()
            indices[0, ..., position, :] = torch.from_numpy(units.astype(np.int64)).reshape(indices[0, ..., position, :].shape)
            num_selections += 1
        return SimpleNamespace(indices=indices) if scores.ndim == 3 else (best_of_all.values, indices)

    usual, modules = torch.Tensor.topk, []
    for module in model.modules():
        if type(module).__name__.endswith("Indexer"):
            modules.append(module)
    real = type(modules[0]).forward

    def forward(self: torch.nn.Module, *args: object, **more: object) -> torch.Tensor:
        with patch.object(torch.Tensor, "topk", choose):
            return real(self, *args, **more)

    with patch.object(type(modules[0]), "forward", forward):
        logits = oracle(model, ids)
    assert next(remaining, None) is None and len(modules) == len(chosen)
    return logits, num_selections
