"""Stored inputs: activations of a real model, with their provenance, and the chore that recorded them.

Here belong files that the suite reads (safetensors and JSON, a few MiB, each with a hash and a licence in
`README.md`) and the programs that make them (`python -m properties.data.capture`). Reading them is
`properties.inputs.real_input`'s business: no module of the suite imports this folder, and nothing here imports the
suite.
"""
