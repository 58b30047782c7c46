"""Where drafts come from that `speculate.py` verifies: the text itself, a draft model, or heads trained for the model."""
