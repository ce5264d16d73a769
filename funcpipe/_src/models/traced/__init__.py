"""Cut a traced forward (``torch.export``) into stages."""
