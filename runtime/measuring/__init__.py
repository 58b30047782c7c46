"""Rulers: speed, perplexity and divergence, recall, and models of random weights to measure with."""
