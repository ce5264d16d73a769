"""What needs models and runtime together: the drop-in Pipe, split models, measured times and memory per layer."""
