"""The properties of packed and of paged attention."""
