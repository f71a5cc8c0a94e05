"""What a save writes, and which rank writes it.

`taken` takes the state of objects, with the `parts` of models that ranks have in pipelines; `ranks` agree on it by the
`digest` of their values. `staging` copies it for a save in the background. `rng` has the state of random number
generators.
"""
