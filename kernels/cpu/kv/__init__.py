"""Packed pages of the KV cache: sealing them, attention over them, and which of the disk's a token reads. Exact ones: `../attention.py`."""
