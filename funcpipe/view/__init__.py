"""Interpreters that need no device: simulation, drawings, reports."""
