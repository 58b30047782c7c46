"""Models whose activation leaves neurons out: what is left out, guessed, recorded and laid out for it."""
