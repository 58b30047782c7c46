"""File I/O of the program itself: where its files live, atomic writes, bounded reads; and files the user attaches to a prompt."""
