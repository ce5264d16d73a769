"""Search a schedule under limits of memory: moves, bounds, an exact solver."""
