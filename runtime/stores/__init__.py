"""Checkpoint layouts: TensorStores that rename, slice, transpose and decode what other tools wrote."""
