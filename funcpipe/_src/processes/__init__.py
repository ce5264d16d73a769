"""Several processes as one plan: rendezvous, one connection for each pair, frames, failures,
heartbeats."""
