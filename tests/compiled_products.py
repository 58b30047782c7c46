"""Compiles the products of the formats named for a card of a compute capability, which need not be there: `test_stored_product.py`."""

import sys

from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from effllm.kernels import tiles
from effllm.kernels.cuda import stored_product as own
from effllm.quant.spec import QuantSpec

POINTERS = {"x": "*fp32", "blob": "*u8", "bias": "*fp32", "out": "*fp32", "weight": "*bf16", "factor": "fp32"}
PLAIN = {"BIAS": False, "ADDS": False}


def made(kernel: object, capability: int, **fixed: int) -> CompiledKernel:
    """As a launch would have it whose widths are multiples of sixteen."""
    types = {name: "constexpr" if name in fixed else POINTERS.get(name, "i32") for name in kernel.arg_names}
    even = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name not in (*fixed, *own._VARYING)}
    target, options = GPUTarget("cuda", capability, 32), {"num_warps": own.WARPS}
    return compile(ASTSource(kernel, types, constexprs=fixed, attrs=even), target=target, options=options)


def main(capability: int, texts: list[str]) -> None:
    for tokens in (1, 8):
        made(own._product_of_halves, capability, T=tokens, R=own.WIDE_ROWS, K=own.WIDE_INPUTS, EVEN=tokens == 1, **PLAIN)
    for text in texts:
        spec = QuantSpec.parse(text)
        kind = {"BITS": spec.bits, "FIRST": tiles.PLANES[spec.bits][0], "GROUP": spec.group, "SCHEME": tiles.SCHEMES[spec.scheme],
                "ASM": True}
        made(own._open, capability, V=own.OPENED, **kind)
        if spec.outliers:
            made(own._correct, capability, O=own.OUTLIERS)
        for tokens in (1, 8):
            if spec.outliers:
                made(own._add_outliers, capability, T=tokens, O=own.OUTLIERS)
            found = made(own._product_of_codes, capability, T=tokens, V=own.TILES_OF_WARP * own.WARPS, EVEN=tokens == 1, **kind, **PLAIN)
            print(text, tokens, len(found.asm["cubin"]))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
