"""What `convert.py` drives: which format every tensor gets, how long it takes, and the rows on their way through a method."""
