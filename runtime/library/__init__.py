"""The models on this machine: their names, lists of them, what is half made, checked and removed."""
