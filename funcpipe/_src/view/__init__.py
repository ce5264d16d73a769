"""Simulate a schedule; draw, compare and explain timelines. No torch."""
