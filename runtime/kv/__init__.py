"""Around the KV cache (`cache.py`): its shape and size, recurrent states, recorded profiles, spilling to disk."""
