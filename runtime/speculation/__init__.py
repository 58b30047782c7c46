"""What `speculate.py` verifies: drafts from the text, by a small model, by a layer of the model's own."""
