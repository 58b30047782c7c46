"""The arithmetic of predictions: sums, the limiting tier, and reports on unknown quantities."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effllm.offload.predict import (
    NARROW_FEATURES_PER_PRODUCT,
    WIDE_FEATURES_PER_PRODUCT,
    KindRate,
    PagedExpertCost,
    Rates,
    WeightCost,
    Work,
    decode,
    load_seconds,
    prompt,
)
from effllm.runtime.planning import machine_probe

GB = 10**9
RATES = Rates(20 * GB, 1e-4, 1e-5, {"bf16": KindRate(16 * GB, 50 * GB), "low": KindRate(8 * GB, 200 * GB)},
              {"16bit": KindRate(10 * GB, 30 * GB)}, disk=GB)
WORK = Work((WeightCost("bf16", 2 * GB, GB), WeightCost("low", GB // 2, GB)), attention_width=4096, windows=(None,) * 20,
            kv="16bit", kv_bytes=20_000, load=3 * GB)


def test_a_token_is_the_sum_of_its_parts() -> None:
    made = decode(WORK, RATES)
    assert made.seconds == pytest.approx(2 / 16 + 0.5 / 8 + 1e-4 + 20 * 1e-5)
    assert (made.limit, made.disk_s, made.error) == ("memory", 0.0, 0.15)
    assert made.memory_s == pytest.approx(2.5 / 20) and made.range == pytest.approx((made.tokens_per_s / 1.15, made.tokens_per_s * 1.15))


def test_a_small_model_lives_in_a_cache() -> None:
    rate = KindRate(10 * GB, GB, 40 * GB)
    assert rate.decode_at(1) == rate.decode_at(8 << 20) == 40 * GB and rate.decode_at(256 << 20) == rate.decode_at(GB) == 10 * GB
    assert rate.decode_at(16 << 20) == pytest.approx(25 * GB) and KindRate(10 * GB, GB).decode_at(1) == 10 * GB
    small = replace(WORK, parts=(WeightCost("bf16", 1 << 20, GB),))
    assert decode(small, replace(RATES, kinds={"bf16": rate})).seconds == pytest.approx((1 << 20) / (40 * GB) + 3e-4)


def test_a_prompt_of_narrow_layers_costs_more_a_product() -> None:
    """What goes by inputs and outputs, norms and activations among them, is the larger part there."""
    rate = KindRate(16 * GB, 50 * GB, narrow=25 * GB)

    def seconds(features: float, rate: KindRate = rate) -> float:
        work = replace(WORK, parts=(WeightCost("bf16", 1, GB, features=round(features * GB)),), windows=())
        return prompt(work, replace(RATES, kinds={"bf16": rate}), 512).seconds - 1e-4

    wide, narrow = WIDE_FEATURES_PER_PRODUCT, NARROW_FEATURES_PER_PRODUCT
    assert seconds(narrow) == pytest.approx(512 / 25) and seconds(wide) == pytest.approx(512 / 50) == seconds(0.0)
    assert seconds((wide + narrow) / 2) == pytest.approx(512 * (1 / 25 + 1 / 50) / 2) and seconds(0.02) > 1.6 * seconds(0.01)
    for other in (KindRate(16 * GB, 50 * GB), KindRate(16 * GB, 50 * GB, narrow=80 * GB)):  # not measured, or by a machine that was busy
        assert seconds(0.02, other) == pytest.approx(512 / 50)


@pytest.mark.parametrize(("shape", "share"), [(machine_probe.WIDE, WIDE_FEATURES_PER_PRODUCT),
                                              (machine_probe.THIN, NARROW_FEATURES_PER_PRODUCT)])
def test_layers_are_measured_where_a_prompt_is_said_to_be(shape: dict[str, object], share: float) -> None:
    matrices = machine_probe._matrices(shape).values()
    assert sum(map(sum, matrices)) / sum(rows * depth for rows, depth in matrices) == pytest.approx(share, rel=0.01)


def test_depth_costs_attention() -> None:
    deep = decode(WORK, RATES, 10_000).seconds - decode(WORK, RATES).seconds
    assert deep == pytest.approx(10_000 * 20 * 4096 / (10 * GB))
    windowed = replace(WORK, windows=(None,) * 10 + (1000,) * 10)
    assert decode(windowed, RATES, 10_000).seconds - decode(WORK, RATES).seconds == pytest.approx(deep * 0.55)


def test_what_lies_deep_in_a_context_has_a_rate_of_its_own() -> None:
    """A packed cache's newest tokens are exact and cost several times as much as packed ones."""
    rates = replace(RATES, attention={"16bit": KindRate(10 * GB, 30 * GB, deep=40 * GB)})
    start = decode(WORK, rates).seconds
    assert decode(WORK, rates, 1024).seconds - start == pytest.approx(1024 * 20 * 4096 / (10 * GB))
    deep = decode(WORK, rates, 11_024).seconds - start
    assert deep == pytest.approx(1024 * 20 * 4096 / (10 * GB) + 10_000 * 20 * 4096 / (40 * GB))
    half = replace(WORK, windows=(None,) * 10 + (1000,) * 10)
    assert decode(half, rates, 11_024).seconds - start == pytest.approx(deep / 2 + 1000 * 10 * 4096 / (10 * GB))
    other = decode(replace(WORK, kv="4bit"), rates, 11_024)
    assert other.seconds == pytest.approx(start + deep) and other.error == pytest.approx(0.45), "of another precision, the slowest known"


def test_attention_is_never_faster_than_memory() -> None:
    wide = replace(WORK, kv_bytes=20_000_000)
    assert decode(wide, RATES, 1000).seconds - decode(wide, RATES).seconds == pytest.approx(1.0)


def test_layers_that_differ_are_counted_by_themselves() -> None:
    work = replace(WORK, windows=(None, 1000), kv_bytes_by_layer=(3000, 1000), kv_bytes=4000, attention_widths=(8192, 2048))
    deep = decode(work, RATES, 10_000).seconds - decode(work, RATES).seconds
    assert deep == pytest.approx((10_000 * 8192 + 1000 * 2048) / (10 * GB))
    much = replace(work, kv_bytes_by_layer=(30_000_000, 10_000_000))
    assert decode(much, RATES, 10_000).seconds - decode(much, RATES).seconds == pytest.approx((10_000 * 30 + 1000 * 10) / 20_000)
    assert replace(work, resident_kv_tokens=500).kv_disk_bytes(10_000) == 9500 * 3000 + 1000 * 1000
    alike = replace(work, attention_widths=(8192, 8192))
    assert prompt(alike, RATES, 100).seconds - prompt(work, RATES, 100).seconds == pytest.approx(5050 * 6144 / (30 * GB))


def test_what_streams_is_hidden_behind_the_processor_or_is_all_there_is() -> None:
    little, much = (replace(WORK, streamed=nbytes) for nbytes in (GB // 100, 2 * GB))
    assert decode(little, RATES).seconds == decode(WORK, RATES).seconds
    assert decode(much, RATES).seconds == 2.0 and decode(much, RATES).limit == "disk" and decode(much, RATES).error == 0.25
    assert decode(much, replace(RATES, disk=None)) is None and prompt(much, replace(RATES, disk=None), 9) is None
    assert load_seconds(WORK, RATES) == 3.0 and load_seconds(WORK, replace(RATES, disk=None)) is None


# The shape of Llama 3.2 1B at 4 bits, 32,767 tokens deep, of which memory holds 12,864: weights and rates of two cores.
TIERS = Work((WeightCost("low", 720_000_000, 1_236_000_000),), attention_width=4096, windows=(None,) * 16, kv="4bit", kv_bytes=9280,
             resident_kv_tokens=12_864)
TWO_CORES = Rates(30 * GB, 1e-4, 2e-5, {"low": KindRate(30 * GB, 100 * GB)}, {"4bit": KindRate(20 * GB, 40 * GB, deep=60 * GB)},
                  disk=800_000_000,
                  reread_rate=lambda nbytes, checked: 800_000_000 if nbytes > 200_000_000 else 1_400_000_000 if checked else 1_600_000_000)


def test_pages_on_the_disk_come_as_fast_as_what_is_read_again() -> None:
    made = decode(TIERS, TWO_CORES, 32_767)
    assert TIERS.kv_disk_bytes(32_767) == 184_699_840
    assert made.disk_s == pytest.approx(0.13192845714) and made.seconds == made.disk_s and made.limit == "disk"
    # 24 ms of weights, 38.027 of attention, 0.42 that no weight explains
    assert made.processor_s == pytest.approx(0.024 + 65_536 * (1024 / 20e9 + 31_743 / 60e9) + 4.2e-4)
    deeper = replace(TIERS, resident_kv_tokens=0)
    assert decode(deeper, TWO_CORES, 32_767).disk_s == pytest.approx(32_767 * 9280 / 8e8), "more than was read twice"
    both = decode(replace(TIERS, streamed=15_000_000), TWO_CORES, 32_767)
    assert both.disk_s == pytest.approx(184_699_840 / 1.4e9 + 15e6 / 1.6e9), "pages are checked, weights are not"
    assert decode(replace(TIERS, streamed=16_000_000), TWO_CORES, 32_767).disk_s == pytest.approx(200_699_840 / 8e8)
    assert decode(TIERS, replace(TWO_CORES, reread_rate=None), 32_767).seconds == pytest.approx(184_699_840 / 8e8)


def test_a_prompt_reads_pages_again_and_weights_for_the_first_time() -> None:
    found = prompt(replace(TIERS, chunk=8192), TWO_CORES, 32_768)
    assert found.disk_s == pytest.approx(9280 * (16_384 - 12_864 + 24_576 - 12_864) / 1.4e9)
    assert prompt(replace(TIERS, resident_kv_tokens=None, streamed=80_000_000), TWO_CORES, 512).disk_s == pytest.approx(0.1)


def test_experts_are_waited_for_and_pages_come_beside_everything() -> None:
    paged = PagedExpertCost(layers=10, experts=8, per_token=2, expert_nbytes=10_000_000, resident_share=0.5, hit_rate=0.5)
    work = replace(WORK, parts=(WeightCost("bf16", 2 * GB, GB), WeightCost("low", GB // 2, GB, routed=True)), is_moe=True,
                   resident_kv_tokens=0, kv_bytes=10_000, paged=paged, streamed=100_000_000)
    # 125 ms of what is no expert, 62.5 of experts, 0.3 fixed, 8.192 of attention per 1,000 tokens; experts take the disk 100 ms
    processor = 0.125 + 0.0625 + 3e-4
    assert decode(work, RATES).seconds == pytest.approx(processor + 0.1)
    near = decode(work, RATES, 1000)
    assert near.disk_s == pytest.approx(0.1 + 0.01)
    assert near.seconds == pytest.approx(processor + 8.192e-3 + 0.1), "pages come beside everything"
    far = decode(work, RATES, 70_000)
    assert far.seconds == pytest.approx(max(processor + 0.57344, 0.7) + 0.1)
    repacked = replace(work, paged=replace(paged, repack_s_per_expert=1e-3))
    assert decode(repacked, RATES).seconds == pytest.approx(processor + 0.1 + 1e-3 * 10)
    asks = decode(work, replace(RATES, choice_s=1e-4)).seconds
    assert asks == pytest.approx(processor + 0.1 + 1e-4 + 10 * 4e-4), "every layer asks in Python who goes where"


def test_a_prompt_is_read_in_passes() -> None:
    made = prompt(WORK, RATES, 1024)
    pairs = 20 * 1024 * 1025 // 2
    assert made.seconds == pytest.approx(1024 * (1 / 50 + 1 / 200) + pairs * 4096 / (30 * GB) + 2 * (1e-4 + 20 * 1e-5))
    assert made.limit == "processor"
    assert prompt(replace(WORK, streamed=20 * GB), RATES, 1024).seconds == 40.0, "once per chunk of 512"
    assert prompt(replace(WORK, streamed=20 * GB, chunk=2048), RATES, 1024).seconds == pytest.approx(made.seconds, rel=0.01)


def test_the_last_layers_of_a_prompt_run_for_its_last_tokens() -> None:
    half = replace(WORK, parts=(WeightCost("bf16", 2 * GB, GB, last_tokens_share=0.5), WeightCost("low", GB // 2, GB)),
                   num_last_token_layers=10, num_last_tokens=24)
    spared = prompt(WORK, RATES, 512).seconds - prompt(half, RATES, 512).seconds
    pairs = 512 * 513 // 2 - 24 * 512
    assert spared == pytest.approx(0.5 * (512 - 24) / 50 + 10 * pairs * 4096 / (30 * GB))
    assert prompt(half, RATES, 24).seconds == pytest.approx(prompt(WORK, RATES, 24).seconds, rel=0.01)
    assert decode(half, RATES) == decode(WORK, RATES)


def test_the_head_is_made_once_for_a_prompt() -> None:
    headed = replace(WORK, parts=(*WORK.parts, WeightCost("low", 8 * GB, 8 * GB, last_only=True)))
    assert prompt(headed, RATES, 512).seconds - prompt(WORK, RATES, 512).seconds == pytest.approx(1.0)


def test_a_short_prompt_costs_at_least_its_weights() -> None:
    assert prompt(WORK, RATES, 2).seconds > decode(WORK, RATES).seconds * 0.99


def test_what_was_not_measured_widens_the_range() -> None:
    other = replace(WORK, parts=(WeightCost("unknown", 2 * GB, GB),))
    assert decode(other, RATES).error == pytest.approx(0.45) and decode(other, RATES).seconds > 2 / 20
    assert decode(replace(WORK, kv="4bit"), RATES, 100).error == pytest.approx(0.45)
    assert decode(replace(WORK, is_moe=True), replace(RATES, memory_variation=0.1)).error == pytest.approx(0.4)
    assert prompt(WORK, replace(RATES, kinds={}), 512) is None


def test_a_prompt_is_not_predicted_from_weights_that_are_multiplied_otherwise() -> None:
    """Floats and low bits differ by three times; a few floats beside low bits, such as routers, do not decide."""
    low, raw, router = WeightCost("codebook4:16", GB, GB), WeightCost("bf16", GB, GB), WeightCost("bf16", 1000, 1000)
    rates = {"floats": replace(RATES, kinds={"bf16": KindRate(16 * GB, 50 * GB)}),
             "low bits": replace(RATES, kinds={"symmetric6:32": KindRate(16 * GB, 90 * GB), "affine4:64": KindRate(9 * GB, 80 * GB)})}
    predicted = {(name, parts): prompt(replace(WORK, parts=parts), own, 512) for name, own in rates.items()
                 for parts in ((raw,), (low,), (low, router))}
    assert predicted["floats", (raw,)] and predicted["low bits", (low,)] and predicted["low bits", (low, router)]
    assert predicted["floats", (low,)] is predicted["floats", (low, router)] is predicted["low bits", (raw,)] is None
    slowest = prompt(replace(WORK, parts=(replace(low, kind="affine4:64"),)), rates["low bits"], 512)
    assert predicted["low bits", (low,)].seconds == slowest.seconds and predicted["low bits", (low,)].error > slowest.error


@given(st.integers(0, 100_000), st.integers(0, 100_000), st.integers(1, 4000) | st.none())
def test_deeper_is_never_faster(one: int, other: int, window: int | None) -> None:
    work = replace(WORK, windows=(window,) * 20)
    shallow, deep = sorted((one, other))
    assert decode(work, RATES, shallow).seconds <= decode(work, RATES, deep).seconds
    assert prompt(work, RATES, shallow + 1).seconds <= prompt(work, RATES, deep + 1).seconds * 1.0001
