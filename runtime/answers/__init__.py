"""Answers as they are written: one, several at once, for programs; and what is read without one: vectors, rankings."""
