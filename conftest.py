"""Loads the suite's own options and fixtures for every pytest run from a checkout."""

pytest_plugins = ["properties.plugin"]
