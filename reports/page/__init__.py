"""How a report looks: the document model and its HTML, Markdown and SVG."""
