"""Files and folders of this program's own: where they lie, and how they are read and written whole."""
