"""Prompt lookup: what is copied from the text so far."""

import jax.numpy as jnp
import numpy as np
import pytest

import jmat
from jmat.decode.lookup import copies


def copied(text, tokens, longest):
    """The drafts behind a text, and how many of its last tokens stood in it before."""
    n = len(text)
    for length in range(min(longest, n - 1), 0, -1):
        for place in range(n - 1, length - 1, -1):
            if text[place - length : place] == text[n - length :]:
                behind = text[place:]
                return [behind[j % len(behind)] for j in range(tokens)], length
    return None, 0


@pytest.mark.parametrize("longest", [1, 3, 5])
def test_copies_are_those_of_a_search(longest):
    rng = np.random.default_rng(longest)
    lengths = rng.integers(1, 30, size=200)
    texts = rng.integers(0, 4, size=(200, 32)).astype(np.int32)  # what is behind a text is no part
    drafts, matched = copies(jnp.asarray(texts), jnp.asarray(lengths), tokens=6, longest=longest)
    for row, n in enumerate(lengths):
        expected, length = copied(texts[row, :n].tolist(), 6, longest)
        assert int(matched[row]) == length
        if length:
            assert drafts[row].tolist() == expected


def test_a_text_that_goes_round_is_copied_whole(gpt2):
    """A model that writes one token for ever: each draft is accepted."""
    sites = {"logits": jmat.Edit(lambda x: x.at[..., 9].set(1e4))}
    found = jmat.generate(
        gpt2,
        [[5, 9, 9], [7]],
        max_new_tokens=11,
        stop_tokens=[],
        draft=jmat.Lookup(tokens=4),
        sites=sites,
    )
    assert {int(token) for row in found.tokens for token in row} == {9}
    assert [part.tolist() for part in found.drafts] == [[2, 3], [8, 8], [8, 8]]


def test_short_matches_are_left_out(gpt2):
    """One last token stood in the prompt before, and no two."""
    sites = {"logits": jmat.Edit(lambda x: x.at[..., 9].set(1e4))}
    for shortest, drafted in ((1, 4), (2, 0)):
        draft = jmat.Lookup(tokens=4, shortest=shortest)
        found = jmat.generate(
            gpt2, [[5, 9, 7]], max_new_tokens=2, stop_tokens=[], draft=draft, sites=sites
        )
        assert found.drafts.drafted.tolist() == [drafted]
        assert found.tokens[0].tolist() == [9, 9]
