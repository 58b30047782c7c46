"""MXFP4 and MXFP8 as the compressed-tensors package writes them, against its own dequantized values."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from effllm.offload.checkpoint import TensorStore
from effllm.quant.weight import Weight
from effllm.runtime.stores.imported import ImportedStore

pytestmark = [pytest.mark.slow, pytest.mark.peer,
              pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="the compressed-tensors package is not installed")]
NAME = "model.layers.0.mlp.up_proj.weight"
WRITE = """
import sys, torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
written, bits, out, meant = sys.argv[1], int(sys.argv[2]), *sys.argv[3:]
torch.manual_seed(0)
weight = torch.randn(80, 256).mul(torch.rand(80, 1)).bfloat16()
args = QuantizationArgs(num_bits=bits, type="float", strategy="group", group_size=32, symmetric=True, scale_dtype=torch.uint8)
scheme, package = QuantizationScheme(targets=["Linear"], weights=args, format=written), BaseCompressor.get_value_from_registry(written)
most = weight.float().reshape(80, -1, 32).abs().amax(-1) / (6 if bits == 4 else 448)
parts = package.compress({"weight": weight, "weight_scale": torch.exp2(torch.ceil(torch.log2(most))).bfloat16()}, scheme)
save_file({f"model.layers.0.mlp.up_proj.{name}": part.contiguous() for name, part in parts.items()}, out)
save_file({"weight": package.decompress(dict(parts), scheme)["weight"].float()}, meant)
"""


@pytest.mark.parametrize(("written", "bits"), [("mxfp4-pack-quantized", 4), ("mxfp8-quantized", 8)])
def test_what_the_package_packs_is_what_it_unpacks(tmp_path: Path, written: str, bits: int) -> None:
    ran = subprocess.run([sys.executable, "-P", "-c", WRITE, written, str(bits), str(tmp_path / "model.safetensors"),
                          str(tmp_path / "meant")], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    meant = load_file(tmp_path / "meant")["weight"].numpy()
    section = {"quant_method": "compressed-tensors", "format": written,
               "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": bits, "type": "float", "group_size": 32}}}}
    with TensorStore.open(tmp_path) as files, ImportedStore(files, section, "f32") as store:
        np.testing.assert_array_equal(store.read(store.tensors[NAME]).view(np.float32).reshape(80, 256), meant)
    with TensorStore.open(tmp_path) as files, ImportedStore(files, section, "f16", True) as store:
        info = store.tensors[NAME]
        if info.dtype == "U8":
            found = Weight.low_bit(store.container.tensors[NAME].spec, (80, 256), store.read(info)).to_f32()
        else:  # bfloat16, which holds all of them
            assert info.dtype == "BF16"
            found = (store.read(info).view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(80, 256)
        np.testing.assert_array_equal(found, meant)
