"""The implementation of funcpipe. Import from `funcpipe` and its public modules instead: names here
may move."""
