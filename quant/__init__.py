"""Formats of weights and of KV cache pages: pure functions of arrays. It knows kernels, and neither files nor devices."""
