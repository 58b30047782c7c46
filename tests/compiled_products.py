"""Compiles the products of the formats named for a card of a compute capability, which need not be there: `test_stored_product.py`."""

import sys

from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from effllm.kernels import tiles
from effllm.kernels.cuda import stored_product as own
from effllm.quant.spec import QuantSpec

POINTERS = {"x": "*fp32", "blob": "*u8", "bias": "*fp32", "out": "*fp32", "weight": "*bf16"}


def made(kernel: object, capability: int, **fixed: int) -> CompiledKernel:
    types = {name: "constexpr" if name in fixed else POINTERS.get(name, "i32") for name in kernel.arg_names}
    return compile(ASTSource(kernel, types, constexprs=fixed), target=GPUTarget("cuda", capability, 32), options={"num_warps": own.WARPS})


def main(capability: int, texts: list[str]) -> None:
    made(own._product_of_halves, capability, T=1, R=own.WIDE_ROWS, K=own.WIDE_INPUTS, WITH_BIAS=True)
    for text in texts:
        spec = QuantSpec.parse(text)
        kind = {"BITS": spec.bits, "FIRST": tiles.PLANES[spec.bits][0], "GROUP": spec.group, "SCHEME": tiles.SCHEMES[spec.scheme]}
        made(own._open, capability, V=own.OPENED_VECTORS, **kind)
        for tokens, vectors in ((1, own.VECTORS), (8, own.VECTORS // 2)):
            outliers = own.OUTLIERS if spec.outliers else 0
            found = made(own._product_of_codes, capability, T=tokens, V=vectors, OUTLIERS=outliers, WITH_BIAS=True, **kind)
            print(text, tokens, len(found.asm["cubin"]))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
