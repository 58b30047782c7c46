"""Answering a request, from the prompt to the stream of events, alone or several at once; also embeddings and rankings."""
