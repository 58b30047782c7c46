"""Planning: what a run needs of the machine, how fast it will be, and how that compares with the measured result."""
