"""Compiles the Triton kernels (products of the named formats, and a layer's other stages) for a GPU of a given compute capability, which
need not be present: used by `test_stored_product.py`."""

import sys

from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from effllm.kernels import tiles
from effllm.kernels.cuda import triton_attention, triton_stages
from effllm.kernels.cuda import triton_matmul as own
from effllm.kernels.layout import ACTIVATIONS, NORM_LAYER, NORM_RMS
from effllm.quant.spec import QuantSpec

FLOATS = ("x", "bias", "out", "y", "cos", "sin", "gate", "up", "k", "v", "q", "maxima_at", "total", "parts", "sinks")
TYPES = {**dict.fromkeys(FLOATS, "*fp32"), **dict.fromkeys(("blob", "exact", "sealed"), "*u8"), "weight": "*bf16",
         **dict.fromkeys(("slots", "rows_of", "table", "positions"), "*i64"), **dict.fromkeys(("factor", "eps", "scale", "cap"), "fp32")}
PLAIN = {"BIAS": False, "ADDS": False}


def made(kernel: object, capability: int, **fixed: object) -> CompiledKernel:
    """Compile as for a launch whose widths are multiples of sixteen."""
    types = {name: "constexpr" if name in fixed else TYPES.get(name, "i32") for name in kernel.arg_names}
    even = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name not in (*fixed, *own._VARYING)}
    target, options = GPUTarget("cuda", capability, 32), {"num_warps": own.WARPS}
    return compile(ASTSource(kernel, types, constexprs=fixed, attrs=even), target=target, options=options)


def between(capability: int) -> None:
    """Every kernel of a layer that is not a product."""
    for kind, with_bias in ((NORM_RMS, False), (NORM_LAYER, True)):
        made(triton_stages._normalise, capability, N=2048, KIND=kind, BIAS=with_bias)
    for act in ACTIVATIONS.values():
        made(triton_stages._gate, capability, N=triton_stages.VALUES, ACT=act)
    for interleaved in (False, True):
        made(triton_stages._rotate, capability, N=32, NEIGHBOURS=interleaved)
    for halves in (True, False):
        made(triton_stages._write, capability, N=64, HALVES=halves, PARTS=1, ROWS=128)
        made(triton_attention._partials, capability, GROUP=4, R=triton_attention.ROWS, C=triton_attention.CHANNELS, HALVES=halves,
             CAPPED=halves, PRECISION="tf32x3")
        made(triton_attention._merge, capability, GROUP=4, D=64, PAGES_AT_ONCE=triton_attention.PAGES_AT_ONCE, SINKS=halves)


def main(capability: int, texts: list[str]) -> None:
    between(capability)
    for tokens in (1, 8):
        made(own._product_of_halves, capability, T=tokens, R=own.WIDE_ROWS, K=own.WIDE_INPUTS, EVEN=tokens == 1, **PLAIN)
    for text in texts:
        spec = QuantSpec.parse(text)
        kind = {"BITS": spec.bits, "FIRST": tiles.PLANES[spec.bits][0], "GROUP": spec.group, "SCHEME": tiles.SCHEMES[spec.scheme],
                "ASM": True}
        made(own._open, capability, V=own.TILES_PER_PROGRAM, **kind)
        if spec.outliers:
            made(own._correct, capability, O=own.OUTLIERS)
        for tokens in (1, 8):
            if spec.outliers:
                made(own._add_outliers, capability, T=tokens, O=own.OUTLIERS)
            found = made(own._product_of_codes, capability, T=tokens, V=own.TILES_OF_WARP * own.WARPS, EVEN=tokens == 1, **kind, **PLAIN)
            print(text, tokens, len(found.asm["cubin"]))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
