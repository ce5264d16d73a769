"""Stages as programs: traced once, cut into forward, input backward and weight backward."""
