"""What transformers writes, and what a loop over full passes writes: references for
`jmat.generate`.
"""

import numpy as np
import torch

import jmat


def theirs(model, prompts, new, **options):
    """Returns what transformers' `generate` writes behind prompts of ids, padded on the
    left; greedy unless the options say otherwise. No token ends a text.
    """
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(row)) + list(row) for row in prompts])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts])
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        found = model.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=new,
            pad_token_id=0,
            **{"do_sample": False, **options},
        )
    return found[:, longest:].numpy()


def check_greedy(model, found, bound=1e-4, **options):
    """Asserts that each new token is the most likely one, or nearly so, in one pass over
    the whole text; and that scores, where there are any, are those of that pass.
    """
    for row, whole in enumerate(found.sequences):
        _, kept = jmat.run(model, whole[None], keep="logits", **options)
        logits = np.asarray(kept["logits"][0], np.float64)[len(found.prompts[row]) - 1 : -1]
        chosen = logits[np.arange(len(logits)), found.tokens[row]]
        assert (logits.max(1) - chosen < bound).all()
        if found.scores is not None:
            logs = chosen - np.log(np.exp(logits).sum(1))
            np.testing.assert_allclose(found.scores[row], logs, atol=10 * bound)


def check_same(model, prompt, ours, expected, bound=1e-4):
    """Asserts that two greedy texts are the same up to where two tokens were nearly as
    likely. Returns how many tokens were compared.
    """
    differ = np.flatnonzero(ours != expected)
    if not differ.size:
        return len(ours)
    at = int(differ[0])
    read = np.asarray([[*prompt, *ours[:at]]], np.int32)
    _, kept = jmat.run(model, read, keep="logits", read_at=-1)
    logits = np.asarray(kept["logits"][0])
    margin = abs(logits[ours[at]] - logits[expected[at]])
    assert margin < bound, f"token {at}: {ours[at]} and not {expected[at]}, by {margin}"
    print(f"a tie at token {at} of {len(ours)}: margin {margin}")
    return at
