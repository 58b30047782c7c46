"""Conversations that stay: saved, found again by how they begin, and kept between requests."""
