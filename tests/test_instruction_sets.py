"""Identical bytes on every instruction set, also those that this machine lacks: CPU features are forced in child processes.

What a child compiles is decided by Numba's target, so a set that the machine has can be run with the others taken away. One that it lacks
is compiled and its assembly read (LLVM ends the process over an instruction that it cannot select), and run with its instructions emulated.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from low_bit_samples import FORMATS, WITH_OUTLIERS, by_halves, dims_for, few, low_bit, random_codes

from effllm.kernels import reference_low_bit as definition
from effllm.kernels.compile import cpu_features
from effllm.kernels.cpu.int8_ir import INSTRUCTION_SET, SIX_BITS
from effllm.kernels.lazy_numba import compiler
from effllm.kernels.target import target
from effllm.kernels.tiles import LEVEL_SHIFT, scales_nbytes
from effllm.quant.spec import QuantSpec
from effllm.quant.weight import Linear, Norm

HERE = Path(__file__).resolve().parent
X86 = platform.machine() in ("x86_64", "AMD64")
BASE = "+64bit,+cmov,+cx8,+fxsr,+mmx,+sse,+sse2"
AVX2 = f"{BASE},+avx,+avx2,+bmi,+bmi2,+cx16,+f16c,+fma,+lzcnt,+movbe,+popcnt,+sahf,+sse3,+sse4.1,+sse4.2,+ssse3,+xsave"
AVX512 = f"{AVX2},+avx512f,+avx512cd,+avx512dq,+avx512vl,+avx512vnni"
# Set -> processor and features to compile for, the features that a machine needs to run it.
TARGETS = {
    "portable": ("generic", BASE, ()),
    "avx2": ("haswell", AVX2, ("avx2", "fma", "f16c")),
    "avx2vnni": ("alderlake", f"{AVX2},+avxvnni", ("avx2", "avxvnni")),
    "avx512": ("znver4", f"{AVX512},+avx512bw", ("avx512f", "avx512bw", "avx512dq", "avx512cd", "avx512vl", "avx512vnni")),
    "avx512vbmi": ("znver4", f"{AVX512},+avx512bw,+avx512vbmi",
                   ("avx512f", "avx512bw", "avx512dq", "avx512cd", "avx512vl", "avx512vnni", "avx512vbmi")),
}
TARGETS["znver5"] = ("znver5", *TARGETS["avx512vbmi"][1:])  # the same instructions, of which it makes two products a cycle
OWN = "znver5" if SIX_BITS and target()[0] == "znver5" else "avx512vbmi" if SIX_BITS else INSTRUCTION_SET
if "avx512vnni" in cpu_features() and "avxvnni" not in cpu_features():  # 256-bit vectors of the instruction's other encoding
    TARGETS["avx2vnni"] = ("cascadelake", f"{AVX512},-avx512bw", ("avx512f", "avx512dq", "avx512cd", "avx512vl", "avx512vnni"))
# What multiplies, as the assembler writes it.
DOT = {"avx512": r"vpdpbusd\t.*%zmm", "avx2vnni": r"vpdpbusd\t.*%ymm", "avx2": r"vpmaddubsw\t.*%ymm", "portable": r"pmaddwd|pmullw|pmull"}
DOT["avx512vbmi"] = DOT["znver5"] = DOT["avx512"]
WIDE = ("avx512", "avx512vbmi", "znver5")
LOOPS = (("codebook4:16", "codebook"), ("codebook3:16", "codebook"), ("codebook2:16", "codebook"), ("symmetric8:32", "plain"),
         ("super4:32", "super"), ("super5:32", "super"), ("signed6:16", "signed"),
         ("table4:16", "table"), ("table3:16", "table"), ("nibble2:16", "nibble"), ("minimum4:32", "minima"), ("minimum5:32", "minima"),
         ("minimum8:32", "minima"),
         ("nvfp4:16", "small"))

ARM = ("neondot", "neon")  # which LLVM writes assembly for anywhere (`test_arm.py`)

pytestmark = pytest.mark.skipif(not X86, reason="the sets that can be forced are those of x86")


def runs_here(name: str) -> bool:
    return name not in ARM and set(TARGETS[name][2]) <= cpu_features()


def child(code: str, folder: Path | None = None, forced: str | None = None, emulated: str | None = None) -> str:
    """What `code` prints in a process of its own: as this one, with Numba's target forced, or with a set emulated on this machine.

    folder: of the cache; without one, what this machine has compiled serves.
    """
    environment = {**os.environ, **({} if folder is None else {"XDG_CACHE_HOME": str(folder)})}
    prelude = f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
    if forced is not None:
        environment |= {"NUMBA_CPU_NAME": TARGETS[forced][0], "NUMBA_CPU_FEATURES": TARGETS[forced][1]}
        prelude += f"import test_instruction_sets as t\nassert t.OWN == {forced!r}, t.OWN\n"
    if emulated is not None:
        prelude += f"import emulated_instructions\nemulated_instructions.pretend({emulated!r})\n"
    done = subprocess.run([sys.executable, "-P", "-c", prelude + code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


# -- a few loops, quick to compile ---------------------------------------------------------------------------------------------------


@cache
def compiled_loops() -> dict[str, object]:
    """The decode loop of a few formats, each alone in a function."""
    from effllm.kernels.cpu import packed_formats

    def build(bits: int, way: str):
        loop = packed_formats.single_for(bits, way)

        @compiler().njit("void(int64,int64,int64,int64,int64,int64,int64)", error_model="numpy")
        def run(table, tables, x, tiles, shift, zero_shift, out):
            loop(table, tables, x, tiles, shift, zero_shift, out)

        return run

    return {text: build(QuantSpec.parse(text).bits, way) for text, way in LOOPS}


def check_loops() -> None:
    """Run them, and the rounding of activations before them, and hold both against the definition."""
    from effllm.kernels.cpu import packed_activations, packed_avx2, packed_avx2_single, packed_loops, packed_matrix

    depth, rows = 256, 16 * packed_loops.STREAMS
    rng = np.random.default_rng(1)
    x = rng.standard_normal((1, depth), np.float32)
    column, scales = np.zeros(depth, np.int8), np.zeros(depth // 32, np.float32)
    totals, seeds = (np.zeros(depth // 16, np.int32) for _ in range(2))
    packed_activations.quantize_column(x.ctypes.data, depth, column.ctypes.data, scales.ctypes.data, totals.ctypes.data)
    room = np.zeros(64 + depth // 32 * (packed_avx2.RECORD + packed_avx2_single.SPREAD), np.uint8)
    records = -(-room.ctypes.data // 64) * 64
    spread = records + depth // 32 * packed_avx2.RECORD
    packed_avx2.make_column(column.ctypes.data, scales.ctypes.data, depth // 32, packed_avx2.RECORD, records)
    packed_avx2_single.spread_records(records, depth // 32, spread)
    codes, want_scales = definition.quantize_columns(x)
    assert np.array_equal(column, codes[0]) and np.array_equal(scales, want_scales[0])
    assert np.array_equal(totals, codes.reshape(-1, 16).sum(1))
    for text, loop in compiled_loops().items():
        spec = QuantSpec.parse(text)
        made = replace(random_codes(rng, spec, (rows, depth)), rows=np.ones(rows, np.float32))
        packed_activations.make_seeds(packed_matrix.seed_scaling(spec.scheme, spec.group), totals.ctypes.data, seeds.ctypes.data,
                                      depth // 32)
        weight = low_bit(made, spec)
        at, zeros = spec.sections((rows, depth)), np.full(16, LEVEL_SHIFT if spec.scheme == "nvfp" else 1 << (spec.bits - 1), np.uint8)
        streams = np.arange(packed_loops.STREAMS)
        table = np.concatenate([weight.address + at.codes + streams * depth * 2 * spec.bits,
                                weight.address + at.scales + streams * scales_nbytes(spec.scheme, spec.group, depth),
                                np.full(len(streams), zeros.ctypes.data)])
        of_x = np.array([column.ctypes.data, scales.ctypes.data, seeds.ctypes.data, spread])
        out = np.zeros((1, rows), np.float32)
        loop(table.ctypes.data, weight.address + max(0, at.tables), of_x.ctypes.data, depth // 32, 0, 62, out.ctypes.data)
        assert np.array_equal(out, few(x, made, spec)), text


def check_floats() -> None:
    """Products with floats of eight bits, alone and abreast, held against the definition."""
    from effllm.kernels.cpu.ops import CpuOps
    from effllm.kernels.threads import ThreadPool

    rng, pool, none = np.random.default_rng(2), ThreadPool(1), Norm("none")
    ops = CpuOps(pool, dims_for(300, 50))
    for text in ("float8:128", "float8:32"):
        spec = QuantSpec.parse(text)
        codes = random_codes(rng, spec, (50, 300))
        each, x = Linear(low_bit(codes, spec)), rng.standard_normal((7, 300), np.float32)
        for count in (1, 7):
            (found,) = ops.norm_linear(np.ascontiguousarray(x[:count]), none, [each])
            assert np.array_equal(found, few(x[:count], codes, spec)), (text, count)
    pool.close()


def floats_assembly() -> str:
    from effllm.kernels.cpu.fp8_loops import fp8_columns

    return fp8_columns.assembly()


# What widens a vector's codes, and multiplies them.
WIDENS = {"portable": (r"mulps\t", r"fmaf"), "avx2": (r"vcvtph2ps\t.*%ymm", r"vfmadd\w+ps\t.*%ymm"),
          "avx512": (r"vcvtph2psx?\t.*%zmm", r"vfmadd\w+ps\t.*%zmm")}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == ("avx512" if OWN in WIDE else OWN) else pytest.mark.slow)
                                  for name in WIDENS])
def test_floats_of_eight_bits_are_right_and_of_the_instructions_of(name, tmp_path):
    own = name == ("avx512" if OWN in WIDE else OWN)
    if own:
        check_floats()
        found = floats_assembly()
    else:
        check = "t.check_floats(); " if runs_here(name) else ""
        found = child(f"import test_instruction_sets as t; {check}print(t.floats_assembly())", tmp_path, forced=name)
    assert all(re.search(each, found) for each in WIDENS[name])
    assert name in WIDE or "%zmm" not in found


def loop_assembly() -> dict[str, str]:
    return {text: "\n".join(loop.inspect_asm().values()) for text, loop in compiled_loops().items()}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in (OWN, "avx2") else pytest.mark.slow)
                                  for name in TARGETS])
def test_loops_are_right_and_of_the_instructions_of(name, tmp_path):
    """Compiled for the set and, where the machine has it, run."""
    if name == OWN:
        check_loops()
        found = loop_assembly()
    else:
        check = "t.check_loops(); " if runs_here(name) else ""
        code = f"import json, test_instruction_sets as t; {check}print(json.dumps(t.loop_assembly()))"
        found = json.loads(child(code, tmp_path, forced=name))
    assert set(found) == {text for text, _ in LOOPS}
    for text, assembly in found.items():
        assert re.search(DOT[name], assembly), text
        # nothing wider or newer than what was asked for
        assert name in WIDE or "%zmm" not in assembly
        assert name in (*WIDE, "avx2vnni") or "vpdpbusd" not in assembly
        assert ("vpermb" in assembly) == (name in WIDE[1:] and text.startswith(("codebook", "table", "nvfp")))


@pytest.mark.skipif("avx2" not in cpu_features(), reason="the emulation is written in AVX2")
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in ("avx512", "neondot") else pytest.mark.slow)
                                  for name in ("avx512", "avx512vbmi", "avx2vnni", *ARM) if not runs_here(name)])
def test_loops_are_right_with_emulated_instructions_of(name, tmp_path):
    child("import test_instruction_sets as t; t.check_loops()", tmp_path, emulated=name)


def several_assembly() -> str:
    """The loop of several columns of a codebook, alone in a function."""
    from effllm.kernels.cpu import packed_formats, packed_scales

    loop = packed_formats.columns(packed_scales.CODEBOOK, 127)

    @compiler().njit(f"void({', '.join(['int64'] * 14)})", error_model="numpy")
    def run(count, quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share, apart):
        loop(count, quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share, apart)

    return "\n".join(run.inspect_asm().values())


def test_several_columns_without_a_dot_product_keep_a_group_in_registers(tmp_path):
    """Two loops over columns, one a group: multiplications for every quad and every two, hardly a vector on the stack."""
    found = several_assembly() if INSTRUCTION_SET == "avx2" else child(
        "import test_instruction_sets as t; print(t.several_assembly())", tmp_path, forced="avx2")
    blocks = [each for each in re.split(r"\n(?=\.LBB)", found) if "vpmaddubsw" in each]
    assert len(blocks) == 2
    for block in blocks:
        loop = re.split(r"\n\tj\w+\t", block)[0]
        assert len(re.findall(r"vpmaddubsw\t", loop)) == 8 and len(re.findall(r"vpmaddwd\t", loop)) == 4
        assert len(re.findall(r"%ymm.*rsp|rsp.*%ymm", loop)) <= 3


def pairs_assembly() -> str:
    """The loop of several columns of a 4-bit codebook for pairs of row blocks, alone in a function."""
    from effllm.kernels.cpu import packed_avx512, packed_scales

    loop = packed_avx512.pairs(4, packed_scales.CODEBOOK)

    @compiler().njit(f"void({', '.join(['int64'] * 9)})", error_model="numpy")
    def run(count, together, table, tables, x, tiles, shift, zero_shift, sums):
        loop(count, together, table, tables, x, tiles, shift, zero_shift, sums)

    return "\n".join(run.inspect_asm().values())


def test_several_columns_of_wide_vectors_keep_two_row_blocks_in_registers(tmp_path):
    """One loop over columns: a dot product for a quad of each row block, a load for a quad of activations, nothing on the stack."""
    found = pairs_assembly() if INSTRUCTION_SET == "avx512" else child(
        "import test_instruction_sets as t; print(t.pairs_assembly())", tmp_path, forced="avx512")
    loops = [re.split(r"\n\tj\w+\t", each)[0] for each in re.split(r"\n(?=\.LBB)", found) if "vpdpbusd" in each]
    both = next(each for each in loops if len(re.findall(r"vpdpbusd\t", each)) == 16)
    assert len(re.findall(r"vpbroadcastd\t", both)) == 8 + 2 and "rsp" not in both


def groups_assembly() -> str:
    """The tile of a prompt with groups of 32 inputs that have one shift, alone in a function."""
    from effllm.kernels.cpu.gemm_groups import group_product

    @compiler().njit(f"void({', '.join(['int64'] * 7)})", error_model="numpy")
    def run(weights, factors, shifts, stride, panel, out, inputs):
        group_product(weights, factors, shifts, stride, panel, out, inputs)

    return "\n".join(run.inspect_asm().values())


def test_groups_end_in_registers_where_two_products_a_cycle_are_made(tmp_path):
    """A group of three tokens: twelve products a step, twelve conversions at its end, and no sum is stored."""
    found = groups_assembly() if OWN == "znver5" else child("import test_instruction_sets as t; print(t.groups_assembly())", tmp_path,
                                                            forced="znver5")
    loops = [re.split(r"\n\tj\w+\t", each)[0] for each in re.split(r"\n(?=\.LBB)", found) if "vpdpbusd" in each]
    group = max(loops, key=lambda each: len(re.findall(r"vpdpbusd\t", each)))
    assert len(re.findall(r"vpdpbusd\t", group)) % 12 == 0 and len(re.findall(r"vcvtdq2ps\t", group)) in (0, 12)
    assert len(re.findall(r"vmov\w+\t%zmm\d+, [^%\n]*\(", group)) <= 4, "running sums are in memory"


@pytest.mark.parametrize("name", ["avx2"])
def test_loops_over_several_columns_compile_for(name, tmp_path):
    """Every way of scaling, of which this machine's own set may have another loop."""
    if not runs_here(name):
        pytest.skip("this machine lacks it")
    compiled = child("""
from effllm.kernels.cpu import packed_formats
from effllm.kernels.tiles import SCHEMES
loops = {packed_formats.loops_of(scheme, bits, halves).columns for scheme in SCHEMES for bits in (4, 8) for halves in (False, True)}
print(sum(loop.address > 0 for loop in loops))""", tmp_path, forced=name)
    assert int(compiled) >= 8


# -- everything ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in (*TARGETS, *ARM) if name != OWN])
def test_every_format_has_the_same_bytes_on(name, tmp_path):
    """Few and many columns, gated pairs, outliers and embedding rows, against this machine's own set; emulated if it lacks the other. Many
    are multiplied in another way with AVX2 than elsewhere where the codes are of up to four bits."""
    if not runs_here(name) and "avx2" not in cpu_features():
        pytest.skip("the emulation is written in AVX2")
    code = "import json, low_bit_samples; print(json.dumps(low_bit_samples.digests()))"
    own = json.loads(child(code))
    other = json.loads(child(code, tmp_path, **{"forced" if runs_here(name) else "emulated": name}))
    both = set(own) & set(other)
    assert both >= set(FORMATS + WITH_OUTLIERS)
    narrow = {text for text in FORMATS + WITH_OUTLIERS
              if QuantSpec.parse(text).bits <= 4 and not text.startswith(("minimum", "mxfp", "nibble", "nvfp", "super", "table"))}
    apart = {key.split(", ")[0] for key in set(own) ^ set(other)}
    halves = {text for text in FORMATS + WITH_OUTLIERS if by_halves(QuantSpec.parse(text))}
    assert apart == halves | (narrow if "avx2" in (name, INSTRUCTION_SET) else set())
    assert all(own[key] == other[key] for key in both), [key for key in both if own[key] != other[key]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ("avx512", "avx2vnni"))
def test_every_kernel_compiles_for_sets_that_this_machine_may_lack(name, tmp_path):
    code = """
import json
from effllm.kernels.compile import Kernel
from effllm.kernels.cpu import gemm, packed, packed_formats, packed_embedding
from effllm.kernels.machine_code import assembly
from effllm.kernels.tiles import FORMATS
kernels = [value for module in (packed, packed_embedding, gemm) for value in vars(module).values() if isinstance(value, Kernel)]
loops = {loop for form in FORMATS for loop in packed_formats.functions_of(form)}
print(json.dumps({kernel.name: kernel.assembly() for kernel in kernels}
                 | {loop.name: assembly(loop.body, loop.signature, loop.fastmath) for loop in loops}))
"""
    found = json.loads(child(code, tmp_path, forced=name))
    products = [each for each in found if re.match(r"gemm\.multiply$|packed_formats\.(single|pairs|columns)", each)]
    assert len(products) > 30
    for each in products:
        assert re.search(DOT[name], found[each]), each
        assert "vpmaddubsw" not in found[each]
