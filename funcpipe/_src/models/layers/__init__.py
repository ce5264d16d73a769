"""Cut a model between the blocks of its stack, without a trace."""
