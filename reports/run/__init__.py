"""Record files to one run: loading, summing up, comparing two."""
