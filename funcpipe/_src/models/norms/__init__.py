"""Batch norm as deferred state: layers and functions that hand their statistics back."""
