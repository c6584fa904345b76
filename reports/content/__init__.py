"""What a report says, as data: sections, findings, plots, target pages, method, blind spots."""
