"""From record files to pages, and the command line. Calls no target and no oracle; `cli` starts pytest or a report."""
