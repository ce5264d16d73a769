"""Steps of torch.optim over explicit trees, inside a run and outside it, and runs of several
batches."""
