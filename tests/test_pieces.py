"""Pieces of a text file: the draw of the public code of arXiv 2405.12250, and scripts
that read them.
"""

import random

import numpy as np
import pytest

import jmat
from jmat.data import make_examples
from jmat.data.examples import fingerprint
from jmat.data.pieces import draw_pieces
from tests.inside import call, text
from tests.test_reference import REFERENCE


@pytest.fixture
def file(tmp_path):
    """2,005 characters: every five of them name their place; two lines in all, and a
    byte-order mark.
    """
    path = tmp_path / "text.txt"
    path.write_bytes(
        b"\xef\xbb\xbf"
        + "".join(f"é{k:03d}\n" if k == 99 else f"é{k:03d} " for k in range(401)).encode()
    )
    return path


def test_pieces_to_fit_on_are_those_of_the_public_code(file):
    whole = file.read_text("utf-8-sig")
    for seed in (0, 3):
        random.seed(seed)
        starts = random.sample(list(range(len(whole) // 100)), 12)
        by_hand = [whole[start * 100 : start * 100 + 100] for start in starts]
        fit, held_out = draw_pieces(file, 100, 12, 8, seed)
        assert fit == by_hand
        assert len(held_out) == 8
        assert len({*fit, *held_out}) == 20  # all 20 pieces of the text: none is in both parts
        assert {len(piece) for piece in (*fit, *held_out)} == {100}
    few = draw_pieces(file, 100, 12, 3, 3)
    assert few[0] == fit
    assert not set(few[0]) & set(few[1])


def test_too_short_a_text_is_told(file, tmp_path):
    with pytest.raises(
        ValueError, match=r"has 20 pieces of 100 characters, but num_fit=18 and num_eval=3"
    ):
        draw_pieces(file, 100, 18, 3, 0)
    with pytest.raises(
        ValueError, match=r"length=0, num_fit=1, num_eval=1: each must be at least 1"
    ):
        draw_pieces(file, 0, 1, 1, 0)
    with pytest.raises(FileNotFoundError, match="no text file"):
        draw_pieces(tmp_path / "none.txt", 100, 1, 1, 0)


@pytest.mark.slow
def test_linearity_reads_all_tokens_of_the_pieces():
    sizes = {"num_fit": 25, "num_eval": 10, "seed": 1}
    outcome = call("linearity", "--noparts", corpus=text(), piece_length=90, **sizes)
    tokenizer = jmat.load(REFERENCE / "gpt2")[1]
    pieces = draw_pieces(text(), 90, **sizes)
    examples = make_examples(
        *pieces, tokenizer, protocol="din2023", max_length=1024, seed=1, masked=False
    )
    assert outcome.results["text"]["fit"] == fingerprint(examples.fit)
    assert outcome.results["text"]["eval"] == fingerprint(examples.eval)
    score = outcome.one(map="mat", metric="linearity", layer=0, target=1)
    assert score["n"] == sum(len(tokenizer(piece)["input_ids"]) for piece in pieces[0])


def test_maps_say_that_they_are_of_pieces():
    sizes = {"num_fit": 25, "num_eval": 10}
    _, info = call("layer_jump", corpus=text(), piece_length=90, **sizes).maps
    assert info.protocol == "din2023, pieces of 90 characters"


@pytest.mark.parametrize("source", ["docs", "examples"])
def test_only_text_files_are_cut(source, tmp_path):
    given = {"corpus": "docs"}
    if source == "examples":
        given = {"examples": REFERENCE / "gpt2" / "examples.npz"}
    with pytest.raises(
        ValueError, match=r"--piece_length=90 cuts a text file, and \S+ holds sentences"
    ) as error:
        call("linearity", piece_length=90, **given)
    assert "loading" not in str(error.value)


def test_cross_corpus_cuts_every_text_file(tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(text().read_text("utf-8")[::-1], "utf-8")
    sizes = {"num_fit": 25, "num_eval": 10, "layers": "2", "sizes": "25"}
    outcome = call("cross_corpus", corpora=[text(), other], piece_length=60, **sizes)
    counts = {row["n"] for row in outcome.find(metric="precision@1")}
    assert counts == {10}
    assert np.isfinite([row["value"] for row in outcome.find(metric="precision@1")]).all()
    with pytest.raises(ValueError, match="cuts a text file, and docs holds sentences"):
        call("cross_corpus", corpora=[text(), "docs"], piece_length=60, **sizes)
