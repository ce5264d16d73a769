"""`funcpipe.Pipe`: a plan with the interface of an nn.Module."""
