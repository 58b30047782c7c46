"""Tool calls: how models write them, how they are read from a streaming answer, and how messages with them reach a chat template."""
