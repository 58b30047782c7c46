"""Around the sampler (`sampler.py`): samplers with state, generation_config.json, log-probabilities of tokens."""
