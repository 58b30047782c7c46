"""Measurements: speed (bench), perplexity and KL divergence, recall, and synthetic models to measure with."""
