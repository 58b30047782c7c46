"""What `convert.py` drives: which format every tensor gets, how long it takes, and the rows on their way through a method."""

from ...quant.method_names import METHODS as METHODS
from ...quant.method_names import PLAIN as PLAIN
