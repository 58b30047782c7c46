"""Formats of weights and of KV cache pages: pure functions of arrays. It depends on kernels, and knows neither files nor devices."""
