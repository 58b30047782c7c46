"""GPTQ, SpQR and smoothing: outputs are closer than with rtn in every format, and odd inputs do no harm."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import effllm
from effllm import EffllmError, UsageError
from effllm.kernels.layout import capped_silu
from effllm.quant.codes import bf16, dequantize
from effllm.quant.methods import gptq, rtn, smooth, spqr
from effllm.quant.pack import pack, unpack
from effllm.quant.spec import QuantSpec
from effllm.quant.stats import Stats

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
SPECS = ("codebook4:16", "codebook3:16", "codebook2:16", "affine4:32", "affine3:64", "affine2:128", "symmetric3:32", "symmetric8:16",
         "ternary:64")
N, K = 48, 128


def weights(n: int = N, k: int = K, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32) * np.float32(0.03)


def inputs(tokens: int = 600, k: int = K, seed: int = 1) -> np.ndarray:
    """Correlated, of unequal power, as a layer's are."""
    random = np.random.default_rng(seed)
    mixed = random.standard_normal((tokens, k // 4)) @ random.standard_normal((k // 4, k)) + 0.3 * random.standard_normal((tokens, k))
    return (mixed * np.exp(random.standard_normal(k) * 0.7)).astype(np.float32)


def stats_of(x: np.ndarray) -> Stats:
    return Stats(len(x), x.T @ x / len(x), np.square(x).mean(0))


def loss(rows: np.ndarray, codes, spec: QuantSpec, x: np.ndarray) -> float:
    return float(np.square(x @ (rows - dequantize(codes, spec)).T).mean())


@pytest.mark.parametrize("text", SPECS)
def test_gptq_keeps_outputs_that_rtn_loses(text: str) -> None:
    spec, rows, x, unseen = QuantSpec.parse(text), weights(), inputs(), inputs()[:50]
    made = gptq.quantize(rows, spec, stats_of(x))
    assert loss(rows, made, spec, unseen) < 0.6 * loss(rows, rtn.quantize(rows, spec), spec, unseen)
    assert made.codes.max() < 1 << spec.bits and (spec.scheme != "ternary" or made.codes.max() <= 2)
    again = unpack(pack(made, spec), spec, rows.shape)
    assert np.array_equal(dequantize(again, spec), dequantize(made, spec))


@pytest.mark.parametrize("text", ("codebook3:16", "affine4:32"))
def test_a_row_never_sees_another(text: str) -> None:
    spec, rows, stats = QuantSpec.parse(text), weights(), stats_of(inputs())
    whole = gptq.quantize(rows, spec, stats)
    parts = [gptq.quantize(part, spec, stats) for part in (rows[:16], rows[16:32], rows[32:])]
    assert np.array_equal(whole.codes, np.concatenate([part.codes for part in parts]))
    assert np.array_equal(whole.scales, np.concatenate([part.scales for part in parts]))


def test_sweeps_lower_the_error_they_are_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, rows, stats = QuantSpec.parse("codebook3:16"), weights(), stats_of(inputs())
    left = []
    for sweeps in (0, 1, 4):
        monkeypatch.setattr(gptq, "SWEEPS", sweeps)
        errors = rows - dequantize(gptq.quantize(rows, spec, stats), spec)
        left.append(float(np.einsum("nk,nk->", errors @ stats.damped, errors)))
    assert left[2] < left[1] < left[0]


def test_the_feedback_is_a_factor_of_the_hessian() -> None:
    stats = stats_of(inputs())
    factor = stats.feedback.astype(np.float64) + np.eye(K)
    wanted = stats.damped[np.ix_(stats.order, stats.order)]
    inverse = np.linalg.inv(factor)
    diagonal = inverse @ wanted @ inverse.T
    assert np.allclose(np.tril(factor, -1), 0) and (np.diag(diagonal) > 0).all()
    assert np.abs(diagonal - np.diag(np.diag(diagonal))).max() < 1e-4 * np.diag(diagonal).max()


def test_inputs_that_are_always_zero_round_to_the_nearest() -> None:
    spec, rows, x = QuantSpec.parse("symmetric4:32"), weights(), inputs()
    x[:, [3, 40, 127]] = 0
    made = gptq.quantize(rows, spec, stats_of(x))
    meaning = dequantize(made, spec)
    step = np.abs(meaning[:, [3, 40, 127]] - rows[:, [3, 40, 127]])
    alternatives = [dequantize(type(made)(**{**vars(made), "codes": np.clip(made.codes.astype(int) + move, 0, 15).astype(np.uint8)}), spec)
                    for move in (-1, 1)]
    for other in alternatives:
        assert (step <= np.abs(other[:, [3, 40, 127]] - rows[:, [3, 40, 127]]) + 1e-7).all()


@pytest.mark.parametrize("tokens", (16, 60))
def test_fewer_tokens_than_inputs_still_help(tokens: int) -> None:
    spec, rows, x = QuantSpec.parse("codebook4:16"), weights(), inputs()
    made = gptq.quantize(rows, spec, stats_of(x[:tokens]))
    assert np.isfinite(dequantize(made, spec)).all()
    assert loss(rows, made, spec, x) < 1.15 * loss(rows, rtn.quantize(rows, spec), spec, x)


def test_an_all_zero_hessian_is_rtn_by_nearest_codes() -> None:
    spec, rows = QuantSpec.parse("affine4:32"), weights()
    made = gptq.quantize(rows, spec, Stats(600, np.zeros((K, K), np.float32)))
    plain = rtn.quantize(rows, spec)
    assert np.square(rows - dequantize(made, spec)).sum() <= 1.001 * np.square(rows - dequantize(plain, spec)).sum()


@pytest.mark.parametrize("text", ("codebook4:16", "affine3:64"))
def test_a_zero_row_and_a_width_that_no_group_divides(text: str) -> None:
    spec, rows = QuantSpec.parse(text), weights(17, 72)
    rows[5] = 0
    made = gptq.quantize(rows, spec, stats_of(inputs(k=72)))
    assert not dequantize(made, spec)[5].any()
    assert made.codes.shape == (17, 72)
    assert np.array_equal(unpack(pack(made, spec), spec, (17, 72)).codes, made.codes)


def test_gptq_says_what_it_lacks() -> None:
    with pytest.raises(UsageError, match="calibration"):
        gptq.quantize(weights(), QuantSpec.parse("4bit"))
    with pytest.raises(UsageError, match="outliers"):
        gptq.quantize(weights(), QuantSpec.parse("4bit+1%"), stats_of(inputs()))
    broken = weights()
    broken[3, 4] = np.nan
    with pytest.raises(EffllmError, match="NaN"):
        gptq.quantize(broken, QuantSpec.parse("4bit"), stats_of(inputs()))


# -- SpQR --------------------------------------------------------------------------------------------------------------------------


def with_outliers() -> tuple[np.ndarray, set[tuple[int, int]]]:
    rows, random = weights(), np.random.default_rng(5)
    places = {(int(random.integers(N)), int(random.integers(K))) for _ in range(25)}
    for row, col in places:
        rows[row, col] = 0.6 * (-1) ** col
    return rows, places


@pytest.mark.parametrize("calibrated", (False, True))
@pytest.mark.parametrize("text", ("codebook3:16+0.5%", "affine4:64+0.01", "symmetric4:32+2%"))
def test_spqr_keeps_exactly_what_the_spec_says(text: str, calibrated: bool) -> None:
    spec, (rows, places), x = QuantSpec.parse(text), with_outliers(), inputs()
    stats = stats_of(x) if calibrated else None
    made = spqr.quantize(rows, spec, stats)
    sparse = made.sparse
    kept = list(zip(sparse.row.tolist(), sparse.col.tolist()))
    assert len(kept) == round(N * K * spec.outliers) == len(set(kept)) and kept == sorted(kept)
    assert np.array_equal(bf16(sparse.value), sparse.value)
    assert len(places & set(kept)) > 0.7 * len(places) or len(kept) < len(places)
    again = unpack(pack(made, spec), spec, rows.shape)
    assert np.array_equal(dequantize(again, spec), dequantize(made, spec))
    base = QuantSpec(spec.bits, spec.group, spec.scheme)
    plain = gptq.quantize(rows, base, stats) if calibrated else rtn.quantize(rows, base)
    judge = x if calibrated else np.eye(K, dtype=np.float32)
    assert loss(rows, made, spec, judge) < 0.8 * loss(rows, plain, base, judge)


def test_spqr_in_chunks_is_spqr_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, (rows, _), stats = QuantSpec.parse("codebook4:16+1%"), with_outliers(), stats_of(inputs())
    whole = spqr.quantize(rows, spec, stats)
    monkeypatch.setattr(spqr, "CHUNK_NBYTES", 4 * K * 16)
    assert np.array_equal(pack(spqr.quantize(rows, spec, stats), spec), pack(whole, spec))


def test_spqr_without_outliers_is_its_base() -> None:
    spec, rows, stats = QuantSpec.parse("4bit"), weights(), stats_of(inputs())
    assert np.array_equal(spqr.quantize(rows, spec, stats).codes, gptq.quantize(rows, spec, stats).codes)
    assert np.array_equal(spqr.quantize(rows, spec).codes, rtn.quantize(rows, spec).codes)


# -- smoothing ---------------------------------------------------------------------------------------------------------------------


LAYOUT = smooth.Layout(heads=4, kv_heads=2, head_dim=8)
WIDTHS = {"q": (32, 24), "k": (16, 24), "v": (16, 24), "o": (24, 32), "gate": (40, 24), "up": (40, 24), "down": (24, 40)}


def a_layer() -> tuple[dict[str, np.ndarray], dict[str, Stats]]:
    """Random matrices whose inputs are loud in a few places."""
    random = np.random.default_rng(3)
    tensors = {role: weights(*shape, seed=i) for i, (role, shape) in enumerate(WIDTHS.items())}
    tensors |= {norm: smooth.stored(1 + random.random(24), "bf16") for norm in ("input_norm", "post_norm")}
    tensors["v_bias"] = smooth.stored(random.standard_normal(16), "bf16")
    stats = {}
    for role, (_, width) in WIDTHS.items():
        x = random.standard_normal((300, width)).astype(np.float32)
        x[:, ::7] *= 30
        stats[role] = stats_of(x)
    return tensors, stats


def test_smoothing_pays_where_inputs_are_loud() -> None:
    tensors, stats = a_layer()
    spec = QuantSpec.parse("symmetric4:32")
    changed = smooth.equalise(tensors, stats, dict.fromkeys(WIDTHS, spec), LAYOUT)
    assert set(changed) == {*WIDTHS, "input_norm", "post_norm", "v_bias"}
    factors = (changed["down"] / tensors["down"]).mean(0)
    ahead = tensors["post_norm"] / changed["post_norm"]
    assert np.allclose(changed["up"] * factors[:, None], tensors["up"] * ahead, rtol=1e-4)
    for role in ("down", "o"):
        power = stats[role].mean_square
        applied = changed[role][0] / tensors[role][0]
        plain = np.square(tensors[role] - dequantize(smooth.quantize(tensors[role], spec), spec)) @ power
        smoothed = np.square((changed[role] - dequantize(smooth.quantize(changed[role], spec), spec)) / applied) @ power
        assert smoothed.sum() < 0.8 * plain.sum()


class Seen:
    """A Hessian that notes what it is multiplied by."""

    __array_ufunc__ = None

    def __rmatmul__(self, errors: np.ndarray) -> np.ndarray:
        self.dtype = errors.dtype
        return errors @ np.eye(errors.shape[1], dtype=np.float32)


def test_exponents_are_judged_in_float32_whatever_type_factors_have() -> None:
    spec, rows, seen = QuantSpec.parse("4bit"), weights(), Seen()
    factors = np.exp(np.linspace(-1, 1, rows.shape[1]))
    judged = smooth.output_error(rows, spec, factors, replace(stats_of(inputs()), hessian=seen), None)
    scaled = (rows * factors).astype(np.float32)
    errors = (scaled - dequantize(smooth.quantize(scaled, spec), spec)) / factors
    assert seen.dtype == np.float32, "in float64 the Hessian is widened for every exponent"
    assert judged == pytest.approx(np.square(errors).sum(), rel=1e-2)


def test_smoothing_divides_a_norm_into_what_its_type_holds() -> None:
    tensors, stats = a_layer()
    changed = smooth.equalise(tensors, stats, dict.fromkeys(WIDTHS, QuantSpec.parse("4bit")), LAYOUT)
    assert np.array_equal(bf16(changed["input_norm"]), changed["input_norm"]) and (changed["input_norm"] != tensors["input_norm"]).any()
    for role in ("q", "k"):
        assert np.allclose(changed[role] * changed["input_norm"], tensors[role] * tensors["input_norm"], rtol=1e-5)


def test_query_heads_of_a_kv_head_share_their_factors() -> None:
    tensors, stats = a_layer()
    changed = smooth.equalise(tensors, stats, dict.fromkeys(WIDTHS, QuantSpec.parse("4bit")), LAYOUT)
    factors = (changed["o"] / tensors["o"])[0].reshape(2, 2, 8)
    assert np.allclose(factors[:, 0], factors[:, 1], rtol=1e-5)
    before = tensors["v_bias"]
    assert np.allclose(changed["v_bias"] * factors[:, 0].reshape(-1), before, rtol=2**-8)


def test_smoothing_leaves_raw_readers_alone() -> None:
    tensors, stats = a_layer()
    specs = dict.fromkeys(WIDTHS, QuantSpec.parse("bf16")) | {"down": QuantSpec.parse("4bit")}
    assert set(smooth.equalise(tensors, stats, specs, LAYOUT)) == {"up", "down"}


@pytest.mark.parametrize("act", ("clamped_swish", "clamped_silu", capped_silu(7.0)))
def test_smoothing_moves_nothing_through_a_bound(act: str) -> None:
    """What a gate multiplies is cut off there, so a factor in front of it is another one behind."""
    tensors, stats = a_layer()
    specs = dict.fromkeys(WIDTHS, QuantSpec.parse("bf16")) | {"down": QuantSpec.parse("4bit")}
    assert not smooth.equalise(tensors, stats, specs, replace(LAYOUT, act=act))


def test_smoothing_keeps_the_models_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.numpy import save_file

    from effllm.offload.checkpoint import TensorStore
    from effllm.quant.weight import to_f32
    from effllm.runtime.calibrate import LayerStats, calibrate
    from effllm.runtime.config import read_config
    from effllm.runtime.engine import open_engine
    from effllm.runtime.families import llama
    from effllm.runtime.prepare import EngineOptions
    from effllm.runtime.tensors import check_tensors

    monkeypatch.setattr(smooth, "EXPONENTS", ((0.5, 0.5),))
    config = read_config(FABLE)
    ids = np.random.default_rng(0).integers(5, 4000, 640)
    with TensorStore.open(FABLE) as store:
        tensors = {info.name: to_f32(store.read(info).view(np.uint16), "bf16").reshape(info.shape) for info in store.tensors.values()}
    layout = smooth.Layout(config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.norm_kind, "bf16")
    changes = 0
    for event in calibrate(FABLE, ids.tolist()):
        if isinstance(event, LayerStats) and event.key != "outer":
            names = {role: rule.name for role, rule in llama.layer_tensors(config, event.key).items()}
            specs = dict.fromkeys(event.roles, QuantSpec.parse("4bit"))
            changed = smooth.equalise({role: tensors[name] for role, name in names.items()}, event.roles, specs, layout)
            changes += sum(not np.array_equal(tensors[names[role]], array) for role, array in changed.items())
            tensors |= {names[role]: array for role, array in changed.items()}
    assert changes == 6 * 9
    for file in FABLE.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    logits = []
    for folder in (FABLE, tmp_path):
        engine = list(open_engine(folder, EngineOptions(device="cpu", kv="32bit", ctx=256, exact=True)))[-1]
        logits.append(np.concatenate([each.copy() for _, each in engine.score(ids[:100].tolist())]))
        engine.close()
    with TensorStore.open(tmp_path) as store:
        check_tensors(config, store)
    assert np.abs(logits[0] - logits[1]).max() < 2e-3 * np.abs(logits[0]).max()
