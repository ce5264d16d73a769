"""One stage in one run: forward, backward in one or two halves, parameters, random numbers. Knows
no lane."""
