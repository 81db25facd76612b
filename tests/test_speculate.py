"""Self-speculation: the text is that of the whole model, token for token, or by its law."""

import itertools

import jax
import numpy as np
import pytest
from scipy import stats

import jmat
from jmat.maps.carry import Carry
from tests import hf
from tests.test_generate import CASES

NEW = 40


@pytest.fixture(scope="module")
def gpt2_map(gpt2, gpt2_examples):
    return {layer: jmat.fit_map(gpt2, gpt2_examples.fit, layer, 4).map for layer in (1, 2, 3)}


@pytest.fixture(scope="module")
def carry(gpt2, gpt2_examples):
    return jmat.fit_carry(gpt2, gpt2_examples.fit, 2).map


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
    "name", ["carry", "words", "lookup", pytest.param("final", marks=pytest.mark.slow)]
)
def test_other_drafts_change_no_greedy_text(gpt2, gpt2_map, gpt2_examples, carry, name):
    ids = prompts(gpt2.config.vocab_size)
    if name == "final":
        carry = jmat.fit_carry(gpt2, gpt2_examples.fit, 2, earlier="final", rounds=2).map
    draft = {
        "carry": jmat.Draft(2, carry, tokens=3, least=0.02),
        "final": jmat.Draft(2, carry, tokens=3),
        "words": jmat.Draft(2, gpt2_map[2], tokens=3, words=range(0, 80)),
        "lookup": jmat.Lookup(tokens=5, longest=2),
    }[name]
    given = {"max_new_tokens": NEW, "stop_tokens": [17, 230], "scores": True}
    plain = jmat.generate(gpt2, ids, **given)
    found = jmat.generate(gpt2, ids, draft=draft, **given)
    same(found, plain)
    for one, other in zip(found.scores, plain.scores, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    assert 0 < found.drafts.accepted.sum() < found.drafts.drafted.sum()


def drafts_by_hand(model, stand_in, prompt, text, layer, tokens):
    """Cycles, drafted and accepted tokens of a greedy text, by passes over whole texts."""
    whole, at, counts = [*prompt, *text], len(prompt) + 1, [0, 0, 0]
    last, block = model.config.layers - 1, f"block.{layer - 1}"
    while at < len(whole):
        drafted = []
        # h_L is exact before the token that is read first, and then what the map says
        _, acts = jmat.run(model, np.asarray([whole[:at]]), keep=[block, f"block.{last}"])
        final = acts[f"block.{last}"][0, at - 2]
        for _ in range(tokens):
            _, acts = jmat.run(model, np.asarray([[*whole[:at], *drafted]]), keep=block)
            stream = acts[block][0]
            final = stand_in(stream[-1], final, stream[-2])
            drafted.append(int(jmat.logits(model, final).argmax()))
        accepted = 0
        while at + accepted < len(whole) and accepted < tokens:
            if drafted[accepted] != whole[at + accepted]:
                break
            accepted += 1
        counts = [counts[0] + 1, counts[1] + tokens, counts[2] + accepted]
        at += accepted + 1
    return counts


def test_a_carry_takes_exact_streams_first_and_then_its_own(gpt2, carry):
    prompt = prompts(gpt2.config.vocab_size)[0]
    draft = jmat.Draft(2, carry, tokens=3)
    found = jmat.generate(gpt2, [prompt], max_new_tokens=12, stop_tokens=[], draft=draft)
    expected = drafts_by_hand(gpt2, carry, prompt, found.tokens[0].tolist(), 2, 3)
    assert [int(part[0]) for part in found.drafts] == expected


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


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("map", marks=pytest.mark.slow),
        pytest.param("least", marks=pytest.mark.slow),
        "words",
        pytest.param("lookup", marks=pytest.mark.slow),
        pytest.param("carry", marks=pytest.mark.slow),
    ],
)
def test_the_law_is_that_of_the_model(gpt2, gpt2_map, carry, name):
    """All texts of three tokens out of four each, 4,000 or 12,000 drawn."""
    prompt, length, top_k, temperature = [7, 30, 12], 3, 4, 1.3
    if name == "lookup":  # what is likely behind the prompt stands in it already
        x, _ = jmat.run(gpt2, np.asarray([prompt]))
        likely = int(jmat.logits(gpt2, x[0, -1]).argmax())
        prompt = [likely, 30, likely]
    expected = law(gpt2, prompt, length, top_k, temperature)
    likely = sorted({token for text in expected for token in text})
    draft = {
        "map": jmat.Draft(1, gpt2_map[1], tokens=2),
        "least": jmat.Draft(1, gpt2_map[1], tokens=2, least=0.4),
        "words": jmat.Draft(1, gpt2_map[1], tokens=2, words=likely[::2]),
        "carry": jmat.Draft(2, carry, tokens=2),
        "lookup": jmat.Lookup(tokens=2),
    }[name]
    drawn = []
    for seed in range(1 if name in ("words", "lookup") else 3):
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
        assert 0.05 < share < 0.99  # or nothing would be drawn instead
    assert set(drawn) <= set(expected)
    texts = [text for text, chance in expected.items() if chance * len(drawn) > 5]
    counts = np.array([drawn.count(text) for text in texts], float)
    chances = np.array([expected[text] for text in texts]) * len(drawn)
    rest = len(drawn) - counts.sum(), len(drawn) - chances.sum()
    statistic = ((counts - chances) ** 2 / chances).sum()
    if rest[1] > 1e-6:  # rare texts, together
        statistic += (rest[0] - rest[1]) ** 2 / rest[1]
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


def test_rows_on_several_devices_are_the_same(gpt2, gpt2_map, carry):
    """Several times, since programs that need all devices at once can wait for one another."""
    ids = prompts(gpt2.config.vocab_size)
    plain = jmat.generate(gpt2, ids, max_new_tokens=NEW, stop_tokens=[])
    drafts = [jmat.Draft(2, gpt2_map[2], tokens=4)] * 3
    drafts += [jmat.Draft(2, carry, tokens=3, words=range(60)), jmat.Lookup(tokens=3)]
    for draft in drafts:
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


def wrong_carry(width, bias):
    return Carry(np.eye(width), np.eye(width), np.zeros(bias))


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
        (lambda: "mat", "draft is of type str; expected jmat.Draft or jmat.Lookup"),
        (lambda: jmat.Draft(1, jmat.Identity(), words=[]), "words is of type list, .*ids, at"),
        (lambda: jmat.Draft(1, jmat.Identity(), words=[0.5]), "words is of type list, float64"),
        (lambda: jmat.Draft(1, jmat.Identity(), words=[[1], [2, 3]]), "words is of type list"),
        (lambda: jmat.Draft(1, jmat.Identity(), words=[7, 4096]), "words: token id 4096"),
        (lambda: jmat.Draft(1, jmat.Identity(), words=[-1]), "words: token id -1"),
        (lambda: jmat.Lookup(tokens=0), "tokens=0: expected 1 to 64"),
        (lambda: jmat.Lookup(longest=65), "longest=65: expected 1 to 64"),
        (lambda: jmat.Lookup(longest=2, shortest=3), "shortest=3: expected 1 to longest=2"),
        (lambda: jmat.Lookup(shortest="1"), "shortest='1': expected a whole number"),
        (lambda: jmat.Draft(1, wrong_carry(64, 5)), r"bias of the draft's carry is \[5\]"),
        (lambda: jmat.Draft(1, wrong_carry(32, 32)), r"W of the draft's carry is \[32, 32\]"),
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


@pytest.mark.parametrize("draft", [jmat.Draft(1, jmat.Identity()), jmat.Lookup()])
def test_a_repetition_penalty_is_refused(gpt2, draft):
    with pytest.raises(ValueError, match="drafts are checked together"):
        jmat.generate(gpt2, [[5]], repetition_penalty=1.2, draft=draft)


def test_a_short_list_and_another_head_do_not_go_together(gpt2):
    draft = jmat.Draft(1, jmat.Identity(), words=[3, 4])
    with pytest.raises(ValueError, match="the site 'logits' changes: leave out words="):
        jmat.generate(gpt2, [[5]], draft=draft, sites={"logits": jmat.Scale(2.0)})
