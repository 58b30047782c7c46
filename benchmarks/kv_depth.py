#!/usr/bin/env python3
"""Decode deep in a context: our packed and 16-bit caches against llama.cpp's, same random 4-bit weights, sides alternating in one run.

Every side reads the same random tokens up to the depth once, one side after the other (timed as its prompt), then the sides alternate in
turns of a few tokens; decode ratios are taken within a round, figures are medians over rounds. Each of ours has a twin that stays near
depth 0 and alternates with it, and before every turn the memory roofline is measured: a shared machine's memory changes speed within
seconds, also in response to the turn before. A packed cache here has the same bits everywhere, as for a model without a profile.

    python benchmarks/kv_depth.py [--depth 4096] [--kv 4bit 16bit] [--peers NAME ...] [--quick] [--no-results]

Needs the files of compare_llamacpp.py (created if absent), gguf and llama-cpp-python; wants the machine to itself for some ten minutes,
most of them llama.cpp's prompts.
"""

from pathlib import Path
from statistics import median

from platformdirs import user_cache_path

from benchmark_processes import SHAPE, Child, peer_file, quantized_folder, random_folder, result_name
from effllm.runtime.measuring.synthetic import SHAPES
from reference_rates import Roof
from report import Figure, parser_of, publish

PEERS = {"f16": "off,f16,f16", "q8_0 K, f16 V": "off,q8_0,f16", "q4_0, flash attention": "on,q4_0,q4_0",
         "q8_0, flash attention": "on,q8_0,q8_0"}
TURN, SLACK = 8, 512
INTRO = ("Random weights of 4 bits at the shape of {shape} (ours codebook4:16, llama.cpp Q4_0), batch 1. Depth 0 is the first "
         "tokens of a second process, in turns with the deep one. Roof: a load-only kernel over 1 GiB with the same threads, before every "
         "turn.")


def main() -> None:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("--depth", type=int, default=4096)
    parser.add_argument("--kv", nargs="+", default=["4bit", "16bit"])
    parser.add_argument("--shape", default=SHAPE, choices=list(SHAPES))
    parser.add_argument("--work", type=Path, default=user_cache_path("effllm") / "benchmarks")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS), help="llama.cpp's caches (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    options = parser.parse_args()
    rounds, ctx = (3 if options.quick else 7), options.depth + SLACK
    folder = random_folder(options.shape, options.work)
    our_folder = quantized_folder(folder, "4", options.threads)
    peer = peer_file(folder, "Q4_0", options.threads)
    sides = [Child(f"effllm --kv {kv}", "own", our_folder, options.threads, ctx, kv) for kv in options.kv]
    sides += [Child(f"llama.cpp {name}", "peer", peer, options.threads, ctx, PEERS[name])
              for name in options.peers]
    prompts = {side.name: options.depth / side.request("prefill", options.depth) for side in sides}
    twins = [Child(f"{side.name}, depth 0", "own", our_folder, options.threads, SLACK, kv) for side, kv in zip(sides, options.kv)]
    roof = Roof(options.threads)
    rates, roofs = take_turns([*sides, *twins], rounds, roof)
    facts = sides[0].request("facts")
    for side in [*sides, *twins]:
        side.close()
    roof.close()

    peers = [side.name for side in sides if side.kind == "peer"]
    best = sorted(peers, key=lambda name: median(rates[name]))[-1:]
    figures = []
    first = sides[0].name
    for other, key in (*((name, "best") for name in best), *((name, "q4_0") for name in peers if "q4_0" in name)):
        ratio = median(a / b for a, b in zip(rates[first], rates[other], strict=True))
        figures.append(Figure(f"vs_{key}", f"{first} against {other}", f"decode at depth {options.depth}", ratio, "x"))
    figures += [Figure(f"deep {side.name}", side.name, f"depth {options.depth}", median(rates[side.name]), "tok/s") for side in sides]
    prompt = f"a prompt of {options.depth} tokens, once"
    figures += [Figure(f"prompt {name}", name, prompt, rate, "tok/s") for name, rate in prompts.items()]
    for side, twin in zip(sides, twins):
        kept_share = median(a / b for a, b in zip(rates[side.name], rates[twin.name], strict=True))
        share = median(rate * facts["bytes_per_pass"] / read for rate, read in zip(rates[twin.name], roofs[twin.name], strict=True))
        read = median(roofs[twin.name])
        figures += [Figure(f"kept {side.name}", side.name, "of its rate at depth 0", kept_share, "x"),
                    Figure(f"roof {side.name}", twin.name, f"of the read roof, {read / 1e9:.1f} GB/s", share, "x")]
    publish(result_name(f"kv-depth-{options.depth}", options.shape), "Decode deep in a context", INTRO.format(shape=options.shape), figures,
            keep=not options.no_results)


def take_turns(sides: list[Child], rounds: int, roof: Roof) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Tokens per second of every side, round by round, and the memory bandwidth in bytes per second measured just before."""
    rates: dict[str, list[float]] = {side.name: [] for side in sides}
    roofs: dict[str, list[float]] = {side.name: [] for side in sides}
    for number in range(rounds + 1):
        for side in sides:
            read, seconds = roof(), side.request("forward", TURN, 1)
            if number:  # the first turn wakes the threads
                rates[side.name].append(TURN / seconds)
                roofs[side.name].append(read)
    return rates, roofs


if __name__ == "__main__":
    main()
