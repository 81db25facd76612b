"""How fast jmat is, and how exact, against what people use: the parts of `experiments.benchmark`."""
