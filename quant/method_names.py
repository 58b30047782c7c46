"""The names of the methods in `methods/`, in a file that loads nothing: help pages and completion list them."""

METHODS = ("rtn", "hqq", "gptq", "smooth", "spqr")
PLAIN = "rtn"  # where nobody says a method, and for what no text shows
