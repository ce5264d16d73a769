"""Compile a stage's forward and backward to programs: traced, cut, emitted, recomputed."""
