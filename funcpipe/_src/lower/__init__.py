"""Lower a schedule and its stages to a program for each lane. Runs nothing."""
