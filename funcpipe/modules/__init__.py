"""nn.Module becomes stages, parameters and state."""
