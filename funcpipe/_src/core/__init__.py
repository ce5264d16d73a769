"""Trees, containers, errors, text at a prompt, private names of torch. Knows no stage and no
schedule."""
