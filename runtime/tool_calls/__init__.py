"""Tool calls: how each model family writes them, parsing them from a stream, and grammars that constrain them."""
