"""The index of all results, `results/README.md`, rewritten by `report.publish` whenever a result is kept.

One table per benchmark, one row per machine; figures come from the results' JSON lines, so that no page disagrees with the result it cites.
By hand: `python benchmarks/index.py`.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
PAGE, PREFIX = "README.md", "same-file-"
PROCESSORS = {"znver3": "Zen 3", "znver4": "Zen 4", "znver5": "Zen 5", "cascadelake": "Cascade Lake", "emeraldrapids": "Emerald Rapids",
              "amx": "Xeon, AMX"}
UNKNOWN = "EPYC, older"  # whose results name no generation
INTRO = """# Results

One table a benchmark, one row a result; a row's date leads to the result itself, with everything that was measured, machine and commit. \
Each is named like the script in `benchmarks/` that wrote it and the machine.

Ratios come from runs in which both sides alternate: of speeds effllm is ahead above 1, of times and divergences below. What was compared, \
and what a figure does not say: [measured.md](../../docs/measured.md). This page is made of the results by `python benchmarks/index.py`."""


@dataclass(frozen=True)
class Result:
    """The content of one file. `name`: of the benchmark; `processor`: its common name."""

    file: str
    name: str
    processor: str
    date: str
    commit: str
    title: str
    figures: Mapping[str, float]


Show = Callable[[float], str]


def rounded(value: float) -> str:
    """Three significant digits, or an integer."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def times(value: float) -> str:
    return f"{value:.2f} ×"


def percent(value: float) -> str:
    return f"{100 * value:.0f}%"


@dataclass(frozen=True)
class Table:
    """A table over the benchmarks whose names match `names`. `columns`: heading -> (key of a figure, its format); a `*` in keys stands for
    each of `kinds` in turn, whose heading is `kind`. `named`: the heading for the part of a name after PREFIX. A result without the first
    column's figure has no row."""

    title: str
    names: str
    columns: Mapping[str, tuple[str, Show]]
    kind: str = ""
    kinds: tuple[str, ...] = ("",)
    named: str = ""

    def rows(self, results: Sequence[Result]) -> Iterator[list[str]]:
        for kind in self.kinds:
            for result in results:
                cells = [(result.figures.get(key.replace("*", kind)), show) for key, show in self.columns.values()]
                if cells[0][0] is not None:
                    first = [*([kind.replace("_", ", ")] if self.kind else []), *([result.name.removeprefix(PREFIX)] if self.named else []),
                             result.processor, f"[{result.date}]({result.file})"]
                    yield first + ["" if value is None else show(value) for value, show in cells]

    def text(self, results: Sequence[Result]) -> str:
        heads = [*filter(None, (self.kind, self.named)), "machine", "result", *self.columns]
        lines = [heads, ["---"] * (len(heads) - len(self.columns)) + ["---:"] * len(self.columns), *self.rows(results)]
        return f"## {self.title}\n\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


SPEEDS: Mapping[str, tuple[str, Show]] = {
    "decode": ("decode_*_ratio", times), "tokens/s": ("decode_*_tps", rounded), "of the read roof": ("decode_*_roof", percent),
    "prompt of 512": ("prefill_*_ratio", times), "its tokens/s": ("prefill_*_tps", rounded),
    "eight tokens in a pass": ("columns_*_ratio", times), "peak memory, MB": ("memory_*_effllm_mb", rounded),
    "file, MB": ("file_*_mb", rounded)}
DRAFTS: Mapping[str, tuple[str, Show]] = {
    "text that repeats": ("repeating_gain", times), "an edit": ("edit_gain", times), "a summary with quotes": ("summary_gain", times),
    "code": ("code_gain", times), "stories": ("stories_gain", times)}
DEPTHS = (4096, 8192, 16384)


def depth(tokens: int) -> Table:
    return Table(f"Decode behind {tokens:,} tokens, weights at 4 bits", f"kv-depth-{tokens}", {
        "tokens/s": ("deep effllm --kv *", rounded), "of its rate at depth 0": ("kept effllm --kv *", percent),
        "depth 0, of the read roof": ("roof effllm --kv *", percent), "its prompt, tokens/s": ("prompt effllm --kv *", rounded),
        "llama.cpp f16": ("deep llama.cpp f16", rounded), "q8_0 K, f16 V": ("deep llama.cpp q8_0 K, f16 V", rounded),
        "q8_0, flash attention": ("deep llama.cpp q8_0, flash attention", rounded),
        "q4_0, flash attention": ("deep llama.cpp q4_0, flash attention", rounded)}, "--kv", ("4bit", "8bit", "16bit"))


def attention(heads: str, name: str) -> Table:
    return Table(f"Attention over packed pages, 16,384 tokens, {heads}", name, {
        "a layer, ms": ("ms_*", rounded), "of the read roof": ("roof_*", percent), "against 16 bits": ("against_raw_*", times),
        "sealing a page, ms": ("seal_*", rounded)}, "--kv", ("4bit", "8bit", "3bit", "2bit", "16bit"))


TABLES = (
    Table("A 1.1B shape beside llama.cpp", r"compare-llamacpp(?!.*olmoe).*", SPEEDS, "bits", ("4", "3", "2", "8")),
    Table("The shape of Llama 3 8B at 4 bits", r"compare-llamacpp(?!.*olmoe).*", {
        "decode, tokens/s": ("llama3-8b_decode_4_tps", rounded), "of the read roof": ("llama3-8b_decode_4_roof", percent),
        "peak memory, of the plan": ("llama3-8b_memory_4_plan", percent)}),
    Table("Eight of OLMoE 1B-7B's layers beside llama.cpp", r"compare-llamacpp.*olmoe.*", SPEEDS, "bits", ("4",)),
    Table("One GGUF file beside llama.cpp", r"same-file-.*", {
        "decode": ("decode_ratio", times), "tokens/s": ("decode_tps_effllm", rounded), "prompt": ("prefill_ratio", times),
        "its tokens/s": ("prefill_tps_effllm", rounded), "file, MB": ("file_mb", rounded)}, named="model, random weights"),
    Table("Prompts with activations rounded to bf16 beside float32 tiles", r"rounded-activations", {
        "32 tokens": ("*_32_ratio", times), "64": ("*_64_ratio", times), "512": ("*_512_ratio", times),
        "512, GFLOP/s": ("*_512_gflops", rounded)}, "weights", ("bf16", "fp8")),
    Table("What that rounding costs, and transformers' bfloat16", r"rounded-activations", {
        "KL divergence, millionths": ("effllm_kld", rounded), "same likeliest token, %": ("effllm_same_top", rounded),
        "transformers": ("transformers_kld", rounded), "its same token, %": ("transformers_same_top", rounded)}),
    Table("GGUF files beside effllm's own at 4 bits", r"gguf-decode", {
        "own, tokens/s": ("decode_own_tps", rounded), "Q4_0": ("decode_q4_0_ratio", times), "Q4_K_M": ("decode_q4_k_m_ratio", times),
        "own prompt, tokens/s": ("prefill_own_tps", rounded), "Q4_0's": ("prefill_q4_0_ratio", times),
        "Q4_K_M's": ("prefill_q4_k_m_ratio", times)}),
    Table("Quantizing to 4 bits beside llama-quantize", r"compare-llamacpp.*", {
        "time": ("quantize_ratio", times), "s": ("quantize_effllm_s", rounded), "peak, MB": ("quantize_effllm_peak_mb", rounded),
        "its peak, MB": ("quantize_q4_k_m_peak_mb", rounded)}),
    Table("Speeds as predicted, over what was measured", r"predictions", {
        "prompts, median": ("median prompts", times), "answers, median": ("median answers", times),
        "1.1B at 4 bits, prompt": ("1.1B, 4bit pp512", times), "answer": ("1.1B, 4bit tg32", times),
        "OLMoE, answer": ("OLMoE 7B-A1B, 4bit tg32", times), "from the disk, answer": ("1.1B, bf16, --ram 1200M tg8", times)}),
    *map(depth, DEPTHS),
    Table("A layer's attention where tokens choose what they see, against seeing all", r"chosen-tokens", {
        **{f"{depth:,} held": (f"ratio_*_{depth}", times) for depth in (2048, 8192, 32_768, 131_072)},
        "the last, ms": ("chosen_*_131072", rounded), "of which choosing": ("choice_*_131072", rounded)}, "heads of", (
            "deepseek-v3.2", "glm-5", "minimax-m3")),
    Table("A picture looked at by SigLIP's tower of 400 million weights", r"picture-towers", {
        "torch, of ours": ("ratio_*", times), "ours, s": ("f32_*", rounded), "of bfloat16 weights, s": ("bf16_*", rounded),
        "torch, s": ("torch_*", rounded)}, "patches (729: 27 layers, 4,096: 3)", ("729", "4096")),
    attention("32 query and 4 KV heads of 64", r"kv-kernels"),
    attention("32 query and 8 KV heads of 128", r"kv-kernels-32-8-128"),
    Table("Quality loss of a quantized cache with profile, beside the best rotated block format of llama.cpp, and KIVI", r"kv-quality", {
        "KL divergence": ("kld_*", times), "flips": ("flips_*", times)}, "bits and peer", (
            "8_block", "5_block", "4_block", "4_kivi", "3_kivi", "2_kivi")),
    Table("Drafts from the text, weights in memory", r"speculation-.*-in-memory", DRAFTS),
    Table("Drafts from the text, weights on the disk", r"speculation-(?!.*-in-memory).*", DRAFTS),
    Table("A dense model of 2.1 GB in 1.2 GB", r"offload-.*", {
        "tokens/s": ("tokens_per_s", rounded), "of the disk's rate": ("share", percent), "disk, GB/s": ("disk_gbps", rounded),
        "llama.cpp's mapped file": ("against_peer", times), "accelerate": ("against_accelerate", times),
        "a prompt of 128, of memory's time": ("prompt128_share", times), "of 512": ("prompt512_share", times),
        "peak, GB": ("peak_gb", rounded)}),
    Table("Neurons of a ReLU model, half of them on the disk", r"windowing", {
        "tokens/s": ("windowed_tokens_per_s", rounded), "foreseen": ("predicted_tokens_per_s", rounded),
        "streaming all": ("speedup", times),
        "of their bytes, %": ("read_share", rounded)}),
    Table("Experts of Qwen3-30B-A3B's layers in half their bytes", r"experts-.*", {
        "tokens/s": ("tokens_per_s", rounded), "foreseen": ("predicted_tokens_per_s", rounded),
        "of disk and processor at once": ("share", percent), "llama.cpp's mapped file": ("against_peer", times),
        "found in memory": ("hit_rate", percent), "the best choice's": ("belady", percent),
        "disk, GB/s": ("disk_gbps", rounded)}),
    Table("A 4-bit cache of 32,640 tokens, half of it on the disk", r"kv-tiers", {
        "every page, tokens/s": ("exact_tps", rounded), "foreseen": ("predicted_tps", rounded),
        "of the disk's rate": ("exact_of_disk", percent),
        "pages picked, tokens/s": ("sparse_tps", rounded), "of memory's rate": ("sparse_kept", percent),
        "where tokens want the same": ("alike_kept", percent), "disk, GB/s": ("disk_gbps", rounded)}),
    Table("Several answers of a 1.1B shape at 4 bits at once, against one after the other", r"at-once(-\d+bit)?", {
        "2": ("ratio_2_at_*", times), "4": ("ratio_4_at_*", times), "8": ("ratio_8_at_*", times), "tokens/s of one": ("1_at_*", rounded),
        "of 8": ("8_at_*", rounded)}, "tokens deep", ("256", "1000"), "benchmark"),
    Table("Beside processes that want a core each, weights of a 1.1B shape at 4 bits", r"busy-machine", {
        "decode": ("decode_*_ratio", times), "tokens/s": ("decode_* effllm, 2 threads", rounded),
        "llama.cpp, 2 threads": ("decode_* llama.cpp, 2 threads", rounded), "1 thread": ("decode_* llama.cpp, 1 thread", rounded),
        "prompt of 256": ("prompt_*_ratio", times), "its tokens/s": ("prompt_* effllm, 2 threads", rounded)},
        "processes", ("0", "1", "2")),
    Table("A saved conversation of 2,000 tokens", r"sessions", {
        "read again, s": ("prefill_s", rounded), "restored, s": ("restore_cold_s", rounded), "of 16 bits": ("size", percent)}),
    Table("The first token of `run fable`", r"first-token", {
        "s": ("ttft_warm_s", rounded), "with no kernel compiled, s": ("ttft_cold_s", rounded), "peak, MB": ("peak_warm_mb", rounded)}),
    Table("A pull of 1 GB", r"pull-rate", {"GB/s": ("effllm_gbps", rounded), "against huggingface_hub": ("ratio", times)}),
    Table("The machines", r"limits", {
        "reads, GB/s": ("read_gbps_2t", rounded), "one thread": ("read_gbps_1t", rounded),
        "int8 products, Gop/s": ("int8_dot_gops_2t", rounded), "`torch._int_mm`": ("int8_gemm_gops_2t", rounded),
        "float32, Gflop/s": ("fp32_gemm_gflops_2t", rounded),
        "disk, 1 MiB × 4, GB/s": ("disk_gbps_1MiB_x4", rounded)}),
)


def read(path: Path) -> Result | None:
    """A result file; None for a file without a JSON line, such as the index itself."""
    text = path.read_text(encoding="utf-8")
    line = next((line for line in text.splitlines() if line.startswith("{")), None)
    if line is None:
        return None
    facts = json.loads(line)
    processor = next((name for code, name in PROCESSORS.items() if code in path.stem or code in facts["machine"]), UNKNOWN)
    return Result(path.name, facts["benchmark"], processor, facts["date"][:10], facts["commit"], text.partition("\n")[0].lstrip("# "),
                  facts["figures"])


def page(folder: Path = RESULTS) -> str:
    """The text of the index: the tables, then the results that no table covers."""
    results = [result for path in sorted(folder.glob("*.md")) if path.name != PAGE and (result := read(path)) is not None]
    results.sort(key=lambda result: [*PROCESSORS.values(), UNKNOWN].index(result.processor))
    parts, others = [INTRO], {result.file: result for result in results}
    for table in TABLES:
        matching = [result for result in results if re.fullmatch(table.names, result.name)]
        if any(table.rows(matching)):
            parts.append(table.text(matching))
            for result in matching:
                others.pop(result.file, None)
    rows = [f"| {matching.title} | {matching.name} | {matching.processor} | [{matching.date}]({matching.file}) |"
            for matching in others.values()]
    heads = ["## Others", "", "| what | benchmark | machine | result |", "| --- | --- | --- | --- |"]
    return "\n\n".join([*parts, "\n".join([*heads, *sorted(rows)])]) + "\n"


def write() -> None:
    """Rewrite the index from the results on disk."""
    (RESULTS / PAGE).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    write()
