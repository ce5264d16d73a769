"""nn.Module becomes stages, parameters and state: whole, in rows of layers, by blocks, or
traced."""
