"""The project's own implementations, which show how a target is written and are verified by every run."""
