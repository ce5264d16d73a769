"""Run a program: prepare, lanes with their mailboxes, executors, finish. Computes no gradient by
itself."""
