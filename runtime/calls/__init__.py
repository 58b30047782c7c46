"""Calls of tools: how models write them, how they are read from an answer as it streams, and how messages with them reach a template."""
