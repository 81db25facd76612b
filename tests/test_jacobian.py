"""Mean Jacobians against a loop in torch and against `jax.jacobian`, their errors, and
passes that go on.
"""

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jmat
from experiments.benchmarking.rivals import torch_jacobians
from jmat.capture import jacobians as passes
from jmat.capture.jacobians import jacobian_sums, relative_error
from jmat.capture.prompts import prompt_batches
from jmat.capture.pullback import pull_back
from jmat.capture.snapshots import Snapshots
from jmat.data.examples import Split
from jmat.maps.jacobian import mean_jacobians
from jmat.models.sites import stream_sites, width
from jmat.runtime import hosts
from jmat.runtime.mesh import local_mesh, place
from jmat.runtime.stopping import Terminated
from tests import families, hf

CASES = [
    hf.gpt2("jacobian", n_positions=32),
    pytest.param(families.llama("jacobian"), marks=pytest.mark.slow),
    pytest.param(families.gpt_neox("jacobian"), marks=pytest.mark.slow),
]
SKIP = 3


def texts(vocab_size, lengths, seed=0):
    """Random tokens, as a split of texts of some lengths."""
    rng = np.random.default_rng(seed)
    return Split(
        rng.integers(1, vocab_size, sum(lengths)).astype(np.int32),
        np.array(lengths, np.int32),
        np.zeros(len(lengths), np.int32),
    )


def parts(split):
    """The tokens of each text."""
    return np.split(split.tokens, np.cumsum(split.lengths)[:-1])


@pytest.mark.parametrize("case", CASES, ids=["gpt2", "llama", "gpt_neox"])
def test_mean_jacobians_are_those_of_a_loop_in_torch(case, tmp_path):
    torch_model = hf.make(case)
    model, _ = jmat.load(hf.save(torch_model, tmp_path))
    split = texts(37, [12, 20, 4, 9])  # the third has no position that counts
    *sources, target = stream_sites(model.config.layers)
    found = jacobian_sums(model, split, sources, target, skip_first=SKIP, max_tokens=16)
    expected = [
        torch_jacobians(torch_model, torch.from_numpy(tokens[None, :16]).long(), SKIP)
        for tokens in parts(split)
        if len(tokens) > SKIP + 1
    ]
    assert found.prompts == len(expected) == 3
    for l, source in enumerate(sources):
        each = np.array([J[l].numpy() for J in expected], np.float64)
        norm = np.linalg.norm(each.sum(0))
        assert np.linalg.norm(found.total[source] - each.sum(0)) < 1e-5 * norm
        squares = np.square(each).sum((1, 2))
        np.testing.assert_allclose(np.sort(found.squares[source]), np.sort(squares), rtol=1e-5)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    case = hf.gpt2("jacobian", n_positions=32)
    return jmat.load(hf.save(hf.make(case), tmp_path_factory.mktemp("tiny")))[0]


def by_hand(model, tokens, source, target, skip):
    """The mean Jacobian of one text by `jax.jacobian` of a vector added to the source at
    one position after another.
    """
    counted = range(skip, len(tokens) - 1)

    def summed(value, at):
        edit = jmat.At(at, jmat.Add(value))
        kept = jmat.run(model, jnp.asarray(tokens[None]), sites={source: edit}, keep=target)[1]
        return kept[target][0, skip : len(tokens) - 1].sum(0)

    zero, jacobian = jnp.zeros(width(source, model.config)), jax.jit(jax.jacobian(summed))
    each = [np.asarray(jacobian(zero, jnp.int32(at)), np.float64) for at in counted]
    return np.mean(each, axis=0)


def test_between_sub_modules_of_any_width(tiny):
    split = texts(37, [7])
    pairs = [("block.0.ffn.hidden", "block.1.attn"), ("block.0.attn", "block.0.mid")]
    for source, target in pairs:
        found = mean_jacobians(tiny, split, [source], target, skip_first=4, fewest=1)[source]
        expected = by_hand(tiny, split.tokens, source, target, 4)
        np.testing.assert_allclose(found.matrix, expected, rtol=0, atol=1e-5)


def test_a_masked_model_looks_at_all_tokens(bert):
    split = texts(50, [8])
    found = mean_jacobians(bert, split, ["block.0"], "block.2", skip_first=5, fewest=1)["block.0"]
    expected = by_hand(bert, split.tokens, "block.0", "block.2", 5)
    np.testing.assert_allclose(found.matrix, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.fixture(scope="module")
def many(tiny):
    """Jacobians of 40 texts, all together."""
    split = texts(37, np.random.default_rng(1).integers(8, 32, 40).tolist())
    return split, mean_jacobians(
        tiny, split, ["embed", "block.0"], "block.1", error=0, skip_first=SKIP
    )


def one_by_one(model, split, source, target):
    """The Jacobian of each text, by passes of one text each, on one device."""
    each = [
        Split(tokens, np.array([len(tokens)], np.int32), np.zeros(1, np.int32))
        for tokens in parts(split)
    ]
    devices = jax.devices()[:1]
    return np.array(
        [
            jacobian_sums(
                model, text, [source], target, skip_first=SKIP, fewest=1, rows=48, devices=devices
            ).total[source]
            for text in each
        ]
    )


def test_the_mean_and_its_error_come_from_single_texts(tiny, many):
    split, found = many
    J = one_by_one(tiny, split, "embed", "block.1")
    n, mean = len(J), J.mean(0)
    one = found["embed"]
    norm = np.linalg.norm(mean)
    assert one.prompts == n
    assert np.linalg.norm(one.matrix - mean) < 1e-6 * norm
    variance = np.square(J - mean).sum() / (n - 1)
    assert one.error == pytest.approx(np.sqrt(variance / n) / norm, rel=1e-4)
    low, high = one.interval
    assert low < one.error < high < 2 * one.error
    alpha = np.trace(mean) / 16
    assert one.alpha == pytest.approx(alpha, abs=1e-6)
    identity = np.square(alpha * np.eye(16)).sum() / norm**2
    assert one.identity_share == pytest.approx(identity, rel=1e-5)
    np.testing.assert_allclose(one.without_identity, mean - alpha * np.eye(16), atol=1e-5)
    B = np.random.default_rng(0).standard_normal((16, 16))
    share = variance / n / np.square(B.T - mean).sum()
    assert one.shrinkage(B) == pytest.approx(share, rel=1e-3)
    assert one.shrinkage(mean.T + 1e-6) == 1
    np.testing.assert_allclose(one.shrunk(B).W, (1 - share) * mean.T + share * B, atol=1e-5)
    assert f"40 prompts, relative error {one.error:.3f} [{low:.3f}, {high:.3f}]" in repr(one)


def test_the_bias_joins_the_means_over_counted_positions(tiny, many):
    split, found = many
    starts, ends = split.starts, split.starts + split.lengths
    read = np.zeros(len(split.tokens), bool)
    for start, end in zip(starts, ends, strict=True):
        read[start + SKIP : end - 1] = True
    acts = jmat.capture(tiny, split.with_examples(read), ["embed", "block.1"])
    means = [
        [h[acts.sentence == k].mean(0, dtype=np.float64) for h in acts.values()]
        for k in range(split.num_sentences)
    ]
    x, y = np.mean(means, axis=0)
    lens = found["embed"].map()
    np.testing.assert_allclose(lens(x.astype(np.float32)), y, rtol=0, atol=1e-4)
    assert found["embed"].map(bias=False).bias is None
    np.testing.assert_array_equal(found["embed"].map(bias=False).W, lens.W)


def test_devices_and_hosts_share_the_prompts(tiny, many, monkeypatch):
    split, found = many
    settings = {"skip_first": SKIP, "rows": 40}
    alone = jacobian_sums(tiny, split, ["embed"], "block.1", devices=jax.devices()[:1], **settings)
    assert np.linalg.norm(alone.total["embed"] / 40 - found["embed"].matrix) < 1e-5
    # of two processes one after the other
    monkeypatch.setattr(hosts, "count", lambda: 2)
    sent = []
    for process in range(2):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        gathered = []
        monkeypatch.setattr(hosts, "gather", lambda x, kept=gathered: kept.append(x) or [x.ravel()])
        half = jacobian_sums(tiny, split, ["embed"], "block.1", **settings)
        sent.append((half, gathered))
    assert {half.prompts for half, _ in sent} == {20}
    both = sent[0][0].total["embed"] + sent[1][0].total["embed"]
    np.testing.assert_allclose(both, alone.total["embed"], rtol=0, atol=1e-4)
    assert len(sent[0][1]) == 5  # squares, totals, sketches and two means


def test_a_killed_pass_goes_on_with_the_same_bits(tiny, many, tmp_path, monkeypatch):
    split, _ = many
    settings = {"skip_first": SKIP, "rows": 40, "error": 0.12}
    want = jacobian_sums(tiny, split, ["embed", "block.0"], "block.1", **settings)
    assert 8 <= want.prompts < 40
    kept, add, seen = Snapshots(tmp_path, 1e9, {"model": "a"}), passes._add, []

    def killed(state, pulled, k):
        seen.append(int(k))
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return add(state, pulled, k)

    monkeypatch.setattr(passes, "_add", killed)
    again = {"snapshots": kept, **settings}
    with pytest.raises(Terminated):
        jacobian_sums(tiny, split, ["embed", "block.0"], "block.1", **again)
    got = jacobian_sums(tiny, split, ["embed", "block.0"], "block.1", **again)
    assert seen[:3] == [0, 1, 2]
    assert got.prompts == want.prompts
    for field in ("total", "squares", "sketches", "means"):
        for site, values in getattr(want, field).items():
            np.testing.assert_array_equal(getattr(got, field)[site], values)
    with pytest.raises(ValueError, match=r"settings of the Jacobians was .* and is"):
        jacobian_sums(tiny, split, ["block.0"], "block.1", **again)


def test_a_pass_ends_at_the_wanted_error(tiny, many):
    split, found = many
    wanted = 1.3 * found["embed"].error
    ended = mean_jacobians(
        tiny, split, ["embed"], "block.1", error=wanted, skip_first=SKIP, rows=40
    )
    one = ended["embed"]
    assert 8 <= one.prompts < 40
    assert one.error <= wanted
    # its prompts are the first of the plan, and it goes on while the error is too large
    J = one_by_one(tiny, split, "embed", "block.1")
    plan = prompt_batches(split, max_tokens=32, skip_first=SKIP, rows=4)
    order = np.concatenate([batch.examples[batch.examples >= 0] for batch in plan])
    np.testing.assert_allclose(one.matrix, J[order[: one.prompts]].mean(0), rtol=0, atol=1e-5)
    before = J[order[: one.prompts - 4]]
    assert (
        len(before) < 8
        or relative_error(np.square(before.sum(0)).sum(), np.square(before).sum((1, 2))) > wanted
    )
    # an error from few prompts is not believed
    first = mean_jacobians(tiny, split, ["embed"], "block.1", error=0.99, skip_first=SKIP, rows=40)
    assert first["embed"].prompts == 8


OTHERS = [
    families.bloom("jacobian"),
    families.gpt_neo("jacobian"),
    families.llama("jacobian", "Mistral", sliding_window=4),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.name)
def test_first_tokens_may_be_left_out_of_the_way_back(case, tmp_path):
    mesh = local_mesh(jax.devices()[:1])
    model = place(jmat.load(hf.save(hf.make(case), tmp_path))[0], mesh)
    *sources, target = stream_sites(model.config.layers)
    split = texts(37, [20, 9, 14])
    batch = prompt_batches(split, max_tokens=20, skip_first=5, rows=4)[0]
    inputs = jax.tree.map(jnp.asarray, batch.inputs)
    given = {"sources": tuple(sources), "target": target, "rows": 400, "mesh": mesh}
    whole, less = (pull_back(model, inputs, **given, unseen=unseen) for unseen in (0, 5))
    for field in ("total", "squares", "means"):
        for site, values in getattr(whole, field).items():
            error = np.abs(getattr(less, field)[site] - values).max()
            assert error < 1e-5 * np.abs(values).max()


def test_lengths_come_mixed_and_each_text_once():
    split = texts(37, [5, 90, 20, 40, 64, 33, 3, 300, 31, 32, 8])
    plan = prompt_batches(split, max_tokens=100, skip_first=2, rows=2, seed=3)
    assert {batch.tokens.shape for batch in plan} == {(2, 32), (2, 64), (2, 100)}
    numbers = np.concatenate([batch.examples.ravel() for batch in plan])
    assert sorted(numbers[numbers >= 0]) == [0, 1, 2, 3, 4, 5, 7, 8, 9, 10]
    for batch in plan:
        for row, number in enumerate(batch.examples[:, 0]):
            size = min(len(parts(split)[number]), 100) if number >= 0 else 0
            np.testing.assert_array_equal(batch.tokens[row, :size], parts(split)[number][:size])
            assert batch.segments[row].tolist() == [1] * size + [0] * (len(batch.tokens[0]) - size)
            assert np.flatnonzero(batch.counted[row]).tolist() == list(range(2, size - 1))
    half = numbers[: len(numbers) // 2]
    assert {len(parts(split)[k]) > 32 for k in half if k >= 0} == {True, False}
    other = prompt_batches(split, max_tokens=100, skip_first=2, rows=2, seed=4)
    assert not np.array_equal(numbers, np.concatenate([batch.examples.ravel() for batch in other]))


@pytest.mark.parametrize(
    ("sources", "target", "given", "message"),
    [
        (["block.7"], "block.1", {}, "unknown site 'block.7': the model has the blocks 0 .. 1"),
        (["block.1"], "block.0", {}, "'block.0' does not depend on 'block.1': give a source"),
        (["block.0"], "block.0", {}, "'block.0' does not depend on 'block.0'"),
        (["block.0"], "logits", {}, "'logits' lies behind the blocks"),
        (["block.0.attn.q"], "block.1", {}, "more than a vector at each token"),
        (["block.0.mid"], "block.1", {}, "is a sum: it can be kept, not replaced"),
        (["embed"], "block.1", {"error": -1}, "error=-1: expected a number of at least 0"),
        (
            ["embed"],
            "block.1",
            {"skip_first": 18},
            "1 of 3 texts have 20 tokens or more; at least 2 such texts are needed: of each, the "
            "first 18 tokens and the last one are left out. Give longer texts, or a smaller",
        ),
        (["embed"], "block.1", {"max_tokens": 17}, "prompts are cut to 17 tokens: of each, the"),
    ],
)
def test_what_has_no_jacobian_is_named(tiny, sources, target, given, message):
    with pytest.raises(ValueError, match=message):
        mean_jacobians(tiny, texts(37, [12, 20, 19]), sources, target, **given)


def test_a_part_that_the_target_does_not_see_is_named(tiny):
    with pytest.raises(ValueError, match=r"'block.0.mid' does not depend on 'block.0.ffn'"):
        mean_jacobians(tiny, texts(37, [9, 9]), ["block.0.ffn"], "block.0.mid", skip_first=SKIP)
    damaged = jax.tree.map(lambda x: x * np.float32(np.nan), tiny)
    with pytest.raises(ValueError, match=r"by site 'block.0' is not finite for some prompt"):
        mean_jacobians(damaged, texts(37, [9, 9]), ["block.0"], "block.1", skip_first=SKIP)


@pytest.mark.slow
def test_error_bars_hold_the_truth(tiny):
    """Means over 30 prompts against one over hundreds of others: 95 % of their
    distances lie in the intervals.
    """
    sources, n, times = ["embed", "block.0", "block.1.attn"], 30, 30
    lengths = np.random.default_rng(5).integers(10, 30, n * times).tolist()
    each = np.split(np.arange(n * times), times)
    split = texts(37, lengths, seed=6)
    runs = []
    for numbers in each:
        few = Split(
            split.tokens[split.places(numbers)],
            split.lengths[numbers],
            np.zeros(n, np.int32),
        )
        runs.append(mean_jacobians(tiny, few, sources, "block.1", error=0, skip_first=SKIP))
    inside, ratios = [], []
    for source in sources:
        total = sum(run[source].matrix for run in runs)
        for run in runs:
            one = run[source]
            truth = (total - one.matrix) / (times - 1)
            # the truth has an error of its own
            distance = np.linalg.norm(one.matrix - truth) / np.sqrt(1 + 1 / (times - 1))
            low, high = one.interval
            assert 1 < high / low < 8
            inside.append(low <= distance / np.sqrt(one.square) <= high)
            ratios.append(distance / np.sqrt(one.square) / one.error)
    assert 0.91 < np.mean(inside) <= 1
    assert np.mean(ratios) == pytest.approx(1, abs=0.08)
