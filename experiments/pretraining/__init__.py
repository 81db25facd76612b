"""Parts of `experiments.pretrain`: tokenizers, limits, and the n-gram model to compare
with.
"""
