"""Adapters to other libraries' implementations, one a file, with the heavy import at its top."""
