"""Interpreters without a device: clock and pictures."""
