"""Save and load parameters, state and optimizer by the model's own names."""
