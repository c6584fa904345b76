"""From an observed output to a verdict: the spine, the vacuity gate, empty rows."""
