"""Packed KV cache pages: sealing, attention over them, and selecting which on-disk pages a token reads. Exact pages: `../attention.py`."""
