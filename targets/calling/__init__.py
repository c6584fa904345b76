"""How code under test is found, read and called: signature, metadata, frameworks, deadline, gradient.

No implementation of an op belongs here.
"""
