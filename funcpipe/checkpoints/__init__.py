"""Checkpoints: parameters, state and optimizers in files, whole or not at all."""
