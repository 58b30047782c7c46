"""How checkpoints lie: stores that rename, cut, turn and decode what writers other than this program left."""
