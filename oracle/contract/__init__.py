"""What a target claims about its precision: the contract, the numbers that follow from it, and the usual ones by name.

It stands beneath ops and bounds, which both read it; it knows neither.
"""
