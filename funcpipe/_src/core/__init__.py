"""Trees, containers, errors, texts and private names of torch. Depends on no stage or schedule."""
