"""What `convert.py` drives: the format of every tensor, time estimates, and streaming of rows through a quantization method."""

from ...quant.method_names import METHODS as METHODS
from ...quant.method_names import PLAIN as PLAIN
