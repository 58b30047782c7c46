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

AS_GOOD = 1e-3  # of the spread of a token's scores: as far may two tokens be apart that are taken for one another
CALM = {"hidden_size": 128, "initializer_range": 0.08, "max_position_embeddings": 640, "q_lora_rank": 64, "kv_lora_rank": 64,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "moe_intermediate_size": 64, "intermediate_size": 192}
CHOOSING = {"deepseek_v32": Case("deepseek_v32", {**CASES["deepseek_v32"].changes, **CALM, "index_topk": 70}),
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
LIKE_OTHERS = ("axk2", "hy_v4", "mistral_large4")  # of which slow tests ask what others show in every run


@contextmanager
def noted(engine: Engine) -> Iterator[list[dict[int, np.ndarray]]]:
    """What each selecting layer selected, by token position, int [groups, chosen]."""
    indexes = [each for each in engine.cache.indexes if isinstance(each, LayerIndex)]
    found = [{} for _ in indexes]

    def noting(place: int, index: object, q: np.ndarray, weights: np.ndarray | None, position: int, out: np.ndarray) -> None:
        usual[place](index, q, weights, position, out)
        index.ops.flush()  # and the pass is not recorded
        for row, units in enumerate(out.copy()):
            found[place][position + row] = units.reshape(index.shape.groups, -1)

    usual = [index._choose for index in indexes]
    for place, index in enumerate(indexes):
        index._choose = lambda *given, place=place: noting(place, *given)
    try:
        yield found
    finally:
        for index, own in zip(indexes, usual, strict=True):
            index._choose = own


def guided(model: PreTrainedModel, ids: list[int], chosen: list[dict[int, np.ndarray]]) -> tuple[np.ndarray, int]:
    """The oracle's logits where its indexers choose as ours did, and how many choices that were. Asserts that those are among the best."""
    told, held = iter(chosen), 0

    def choose(scores: torch.Tensor, count: int, dim: int) -> SimpleNamespace:
        nonlocal held
        found = usual(scores, count, dim=dim)
        indices = found.indices.clone()
        for position, units in next(told).items():
            own = scores[0, position] if scores.ndim == 3 else scores[0, :, position]  # one choice, or one a head
            own, best = own.reshape(-1, own.shape[-1]), found.values[0, ..., position, :].reshape(-1, count)
            assert units.shape == best.shape and all(len(set(row)) == count for row in units.tolist())
            given = own.gather(1, torch.from_numpy(units.astype(np.int64)))
            spread = own[torch.isfinite(own)].std()
            worst = best.clamp(max=1e30).min(1).values - given.clamp(max=1e30).min(1).values
            assert (worst <= AS_GOOD * spread).all()
            indices[0, ..., position, :] = torch.from_numpy(units.astype(np.int64)).reshape(indices[0, ..., position, :].shape)
            held += 1
        return SimpleNamespace(indices=indices) if scores.ndim == 3 else (found.values, indices)

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
    assert next(told, None) is None and len(modules) == len(chosen)
    return logits, held
