"""Around the KV cache (`cache.py`): its shape and bytes, states beside it, recorded profiles, the part of it on a disk."""
