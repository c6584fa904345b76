"""The `attn-oracle` command: what was asked, how it is run, what the terminal says, the exit code."""
