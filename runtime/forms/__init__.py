"""Answers held to a form: JSON schemas and grammars, and what they may cost."""
