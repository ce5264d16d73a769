"""Check stages and plans of a user's tests. Face: `funcpipe.testing`."""
