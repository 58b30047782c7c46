"""The program's own files and folders: where they are, and how they are read and written whole; and files that are given to it."""
