"""The arithmetics in which one formula is evaluated.

``base`` states the protocol; ``mp`` is the readable definition (mpmath), ``arb`` proves at any precision
(python-flint), ``ball`` proves whole tensors at BLAS speed (float64 midpoint and radius), ``rounded`` is a
model kernel that rounds each named stage as a contract says. A new arithmetic goes here; a formula does not.
"""
