"""Persistent conversations: saved, found again by prefix, and cached between requests."""
