"""Cut a batch into microbatches and slices, weigh them, join outputs. No row is lost."""
