"""Several replicas of a stage: sums of gradients, gathered parameters, equal numbers. Owns no
connection."""
