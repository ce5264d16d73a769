"""Batches on their way to the step: a software pipeline over a stream of batches."""
