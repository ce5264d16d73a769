"""What layers take: their memory without running them, their times by running them."""
