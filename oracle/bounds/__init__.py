"""What a contract promises, and the derived error bounds that follow from it: one file per op.

A bound takes the enclosures of one block (scores, row maxima, weights, outputs) and a contract, and returns the largest
error that a target which keeps the contract can make on each output element. No bound is picked or fitted.
"""
