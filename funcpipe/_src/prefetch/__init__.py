"""Take batches through stages of preparation while the step computes. Face: `funcpipe.batches`."""
