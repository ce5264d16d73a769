"""Families of schedules, transformations, the check, formats. Numbers only: no torch."""
