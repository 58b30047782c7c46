"""Around the tokenizer (`tokenizer.py`): vocabularies of other forms, text that streams, tokens as bytes, places to fill in."""
