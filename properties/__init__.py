"""What must hold: inputs, judgement, records and the property suite that users run.

`recipes` and `strategies` make inputs, `subject` holds one target at one dtype, `pipeline` examines one case, the
property tables (`attention`, `softmax`, `rope`, `mla`) say what is checked, `plugin` and the ``test_*`` modules run
them under pytest. What does not belong here: a formula or a bound (`oracle`), an implementation (`targets`), a page
(`reports`).
"""
