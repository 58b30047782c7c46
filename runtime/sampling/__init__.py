"""Around the sampler (`sampler.py`): filters with a memory, a model's own settings, chances of tokens."""
