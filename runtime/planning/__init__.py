"""What a run will ask of the machine and how fast it will be, said before; and held against what came."""
