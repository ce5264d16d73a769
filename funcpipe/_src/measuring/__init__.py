"""Measure models and plans: times, memory, the cost of a schedule's actions."""
