"""Names of the quantization methods in `methods/`, in an import-light file for help pages and completion."""

METHODS = ("rtn", "hqq", "gptq", "smooth", "spqr")
PLAIN = "rtn"  # where nobody says a method, and for what no text shows
