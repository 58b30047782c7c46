"""Activation sparsity: neurons that a model skips, predicted, recorded, and laid out for reading on demand."""
