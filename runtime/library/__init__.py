"""Models on this machine: naming, listing, resuming unfinished ones, verifying and removing."""
