"""Self-speculation: the text is that of the whole model, token for token, or by its law."""

import itertools

import jax
import numpy as np
import pytest
from scipy import stats

import jmat
from tests import hf
from tests.test_generate import CASES

NEW = 40


@pytest.fixture(scope="module")
def gpt2_map(gpt2, gpt2_examples):
    return {layer: jmat.fit_map(gpt2, gpt2_examples.fit, layer, 4).map for layer in (1, 2, 3)}


def prompts(vocab_size, lengths=(3, 11, 1, 6)):
    rng = np.random.default_rng(0)
    return [rng.integers(5, vocab_size, size=length) for length in lengths]


def same(one, other):
    assert [row.tolist() for row in one.tokens] == [row.tolist() for row in other.tokens]
    assert one.reasons == other.reasons


@pytest.mark.parametrize(
    ("layer", "tokens", "least"), [(1, 1, 0.0), (2, 4, 0.0), (3, 7, 0.3), (2, 3, 1.0)]
)
def test_greedy_text_is_that_of_the_whole_model(gpt2, gpt2_map, layer, tokens, least):
    ids = prompts(gpt2.config.vocab_size)
    given = {"max_new_tokens": NEW, "stop_tokens": [17, 230], "scores": True}
    plain = jmat.generate(gpt2, ids, **given)
    draft = jmat.Draft(layer, gpt2_map[layer], tokens=tokens, least=least)
    found = jmat.generate(gpt2, ids, draft=draft, **given)
    same(found, plain)
    for one, other in zip(found.scores, plain.scores, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    cycles, drafted, accepted = found.drafts
    new = np.array([len(row) for row in found.tokens])
    assert (accepted <= drafted).all()
    assert (drafted <= tokens * cycles).all()
    # the first token comes with the prompt; each check brings its accepted drafts and one token,
    # unless the text ends within the drafts
    assert set(cycles + accepted - (new - 1)) <= {0, 1}
    if least == 1:
        assert drafted.sum() == 0
    else:
        assert accepted.sum() > 0


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("mistral-window", "bloom-plain")
        else pytest.param(name, marks=pytest.mark.slow)
        for name, case in CASES.items()
    ],
)
def test_every_family(name):
    model = hf.ours(CASES[name])
    ids = prompts(min(model.config.vocab_size, 37))
    if model.config.layers == 1:
        with pytest.raises(ValueError, match="a model of one block has no other blocks"):
            jmat.generate(model, ids, draft=jmat.Draft(1, jmat.Identity()))
        return
    plain = jmat.generate(model, ids, max_new_tokens=20, stop_tokens=[])
    found = jmat.generate(
        model,
        ids,
        max_new_tokens=20,
        stop_tokens=[],
        draft=jmat.Draft(1, jmat.Identity(), tokens=3),
    )
    same(found, plain)


def test_a_text_up_to_the_last_position(gpt2, gpt2_map):
    room = gpt2.config.num_positions
    ids = prompts(gpt2.config.vocab_size, (room - 9,))
    plain = jmat.generate(gpt2, ids, max_new_tokens=9, stop_tokens=[])
    draft = jmat.Draft(2, gpt2_map[2], tokens=6)
    same(jmat.generate(gpt2, ids, max_new_tokens=9, stop_tokens=[], draft=draft), plain)


@pytest.mark.slow
def test_edits_change_drafts_and_checks_alike(gpt2, gpt2_map):
    ids = prompts(gpt2.config.vocab_size)
    push = np.random.default_rng(1).normal(size=64).astype(np.float32)
    sites = {"block.0.ffn": jmat.Scale(0.5), "block.3": jmat.At([8, 9, 15], jmat.Add(push))}
    given = {"max_new_tokens": 20, "stop_tokens": [], "sites": sites}
    plain = jmat.generate(gpt2, ids, **given)
    draft = jmat.Draft(2, gpt2_map[2], tokens=4)
    same(jmat.generate(gpt2, ids, draft=draft, **given), plain)
    without = jmat.generate(gpt2, ids, max_new_tokens=20, stop_tokens=[])
    assert any(
        (a[: len(b)] != b[: len(a)]).any()
        for a, b in zip(plain.tokens, without.tokens, strict=True)
    )


def law(model, prompt, length, top_k, temperature):
    """The probability of every text that can be drawn, by plain forward passes."""
    found = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, chance in found.items():
            x, _ = jmat.run(model, np.asarray([[*prompt, *text]]))
            scores = np.asarray(jmat.logits(model, x[0, -1]), np.float64) / temperature
            top = np.argsort(-scores)[:top_k]
            p = np.exp(scores[top] - scores[top].max())
            for token, share in zip(top, p / p.sum(), strict=True):
                longer[(*text, int(token))] = chance * share
        found = longer
    return found


@pytest.mark.parametrize("least", [pytest.param(0.0, marks=pytest.mark.slow), 0.4])
def test_the_law_is_that_of_the_model(gpt2, gpt2_map, least):
    """All texts of three tokens out of four each, 12,000 drawn."""
    prompt, length, top_k, temperature = [7, 30, 12], 3, 4, 1.3
    expected = law(gpt2, prompt, length, top_k, temperature)
    draft = jmat.Draft(1, gpt2_map[1], tokens=2, least=least)
    drawn = []
    for seed in range(3):
        found = jmat.generate(
            gpt2,
            [prompt] * 4000,
            max_new_tokens=length,
            temperature=temperature,
            top_k=top_k,
            stop_tokens=[],
            seed=seed,
            draft=draft,
        )
        drawn += [tuple(row.tolist()) for row in found.tokens]
        share = found.drafts.accepted.sum() / found.drafts.drafted.sum()
        assert 0.1 < share < 0.99  # or nothing would be drawn instead
    assert set(drawn) <= set(expected)
    texts = [text for text, chance in expected.items() if chance * len(drawn) > 5]
    counts = np.array([drawn.count(text) for text in texts], float)
    chances = np.array([expected[text] for text in texts]) * len(drawn)
    rest = len(drawn) - counts.sum(), len(drawn) - chances.sum()
    statistic = ((counts - chances) ** 2 / chances).sum() + (rest[0] - rest[1]) ** 2 / rest[1]
    assert stats.chi2.sf(statistic, len(texts)) > 1e-3


def test_acceptance_is_the_overlap_of_both_laws(gpt2, gpt2_map):
    """One drafted token a check: it is accepted with probability sum min(p, q)."""
    prompt = [7, 30, 12]
    x, acts = jmat.run(gpt2, np.asarray([[*prompt, 40]]), keep="block.0")
    stand_in = gpt2_map[1](acts["block.0"][0, -1])
    p, q = (np.asarray(jax.nn.softmax(jmat.logits(gpt2, h))) for h in (x[0, -1], stand_in))
    overlap = float(np.minimum(p, q).sum())
    # the first token is drawn with the prompt: a stand-in for the logits there makes it the same
    table = {"logits": jmat.At([2], jmat.Edit(lambda x: x.at[..., 40].set(1e4)))}
    found = jmat.generate(
        gpt2,
        [prompt] * 4000,
        max_new_tokens=2,
        temperature=1.0,
        stop_tokens=[],
        draft=jmat.Draft(1, gpt2_map[1], tokens=1),
        sites=table,
    )
    assert {int(row[0]) for row in found.tokens} == {40}
    share = found.drafts.accepted.mean()
    assert share == pytest.approx(overlap, abs=4 * np.sqrt(overlap * (1 - overlap) / 4000))


def test_rows_on_several_devices_are_the_same(gpt2, gpt2_map):
    """Several times, since programs that need all devices at once can wait for one another."""
    ids = prompts(gpt2.config.vocab_size)
    plain = jmat.generate(gpt2, ids, max_new_tokens=NEW, stop_tokens=[])
    draft = jmat.Draft(2, gpt2_map[2], tokens=4)
    for _ in range(3):
        found = jmat.generate(gpt2, ids, max_new_tokens=NEW, stop_tokens=[], draft=draft)
        same(found, plain)
    assert jax.device_count() == len(ids) == 4


@pytest.mark.slow
def test_streaming_and_stop_strings():
    model, tokenizer = jmat.load("gpt2-docs")
    L = model.config.layers
    draft = jmat.Draft(L - 1, jmat.Identity(), tokens=3)
    given = {"tokenizer": tokenizer, "max_new_tokens": 30, "stop_strings": ["."]}
    plain = jmat.generate(model, ["Return a new", "The"], **given)
    pieces = {0: "", 1: ""}

    def take(row, piece):
        pieces[row] += piece

    found = jmat.generate(model, ["Return a new", "The"], draft=draft, on_text=take, **given)
    assert found.texts == plain.texts
    assert found.reasons == plain.reasons
    assert [pieces[0], pieces[1]] == [*found.texts]
    assert "drafted tokens accepted" in repr(found)


def test_other_numbers_compile_nothing_new(gpt2, gpt2_map):
    from jmat.decode.speculate import write_drafted

    ids = prompts(gpt2.config.vocab_size)

    def write(layer, least, most):
        draft = jmat.Draft(2, gpt2_map[layer], tokens=3, least=least)
        jmat.generate(gpt2, ids, max_new_tokens=most, draft=draft)

    write(2, 0.1, 17)
    size = write_drafted._cache_size()
    for layer, least, most in itertools.product((1, 3), (0.0, 0.5), (18, 20)):
        write(layer, least, most)
    assert write_drafted._cache_size() == size


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jmat.Draft(0, jmat.Identity()), "a draft from layer 0: expected 1 to 3"),
        (lambda: jmat.Draft(4, jmat.Identity()), "a draft from layer 4: expected 1 to 3"),
        (lambda: jmat.Draft(1, jmat.Identity(), tokens=0), "tokens=0: expected 1 to 64"),
        (lambda: jmat.Draft(1, jmat.Identity(), tokens=65), "tokens=65: expected 1 to 64"),
        (lambda: jmat.Draft(1, jmat.Identity(), least=1.5), "least=1.5: expected a probability"),
        (lambda: jmat.Draft(1, jmat.Identity(), least=True), "least=True: expected a probability"),
        (lambda: jmat.Draft("1", jmat.Identity()), "layer='1': expected a whole number"),
        (lambda: jmat.Draft(1, jmat.Add(np.ones(64))), "got the edit Add"),
        (lambda: jmat.Draft(1, 3), "'map' .*int"),
        (lambda: jmat.Draft(1, jmat.Linear(np.eye(5, dtype=np.float32))), "the draft's"),
        (lambda: "mat", "draft is of type str; expected jmat.Draft"),
    ],
)
def test_bad_drafts(gpt2, make, message, unchecked):
    with pytest.raises(ValueError, match=message):
        jmat.generate(gpt2, [[5]], draft=make())


def test_a_map_is_checked_as_it_is_called(gpt2, unchecked):
    flat = jax.tree_util.Partial(lambda W, x: jax.numpy.einsum("nd,de->ne", x, W), np.eye(64))
    with pytest.raises(ValueError, match="the draft's"):
        jmat.generate(gpt2, [[5]], draft=jmat.Draft(1, flat))


def test_what_is_accepted_is_part_of_the_text(gpt2):
    """The last stream drafts what the model writes: each draft is accepted."""
    deep = {f"block.{i}": jmat.Identity() for i in (2, 3)}
    draft = jmat.Draft(2, jmat.Identity(), tokens=4)
    found = jmat.generate(gpt2, [[5, 9]], max_new_tokens=3, stop_tokens=[], draft=draft, sites=deep)
    assert [int(part[0]) for part in found.drafts] == [1, 4, 2]
    assert "3 new tokens in 1 check; 2 of 4 drafted tokens accepted" in repr(found)


def test_a_repetition_penalty_is_refused(gpt2, gpt2_map):
    draft = jmat.Draft(1, gpt2_map[1])
    with pytest.raises(ValueError, match="drafts are checked together"):
        jmat.generate(gpt2, [[5]], repetition_penalty=1.2, draft=draft)
