"""Replicas of a stage: sums of gradients, gathered parameters, equal numbers. No connections."""
