"""From record files to pages, and the command line. Calls no target and no oracle; `cli` starts pytest or a report.

One way through: `load` (files to a run), `summary` (what its records add up to), `sections`, `sheets`, `plots`,
`method` and `blind_spots` (what is said, as blocks of `document`), `render_markdown` and `render_html` (how it looks,
with `markup`, `svg` and ``style.css``), `build` (a folder to its two pages).
"""
