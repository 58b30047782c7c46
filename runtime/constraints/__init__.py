"""Constrained decoding: JSON schemas and grammars that an answer must match, and what preparing them may cost."""
