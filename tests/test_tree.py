"""The tree of a model has every parameter once, under the names of sites."""

import dataclasses
import re

import jax
import pytest
from flax import nnx

import jmat
from jmat import models
from jmat.checkpoint import parameters
from jmat.models.sites import SUBMODULES, readable
from tests.families import CASES, config_of


def shapes_in(text):
    """Dotted path → shape, from the lines of a tree; folded blocks are written out."""
    shapes, above = {}, []
    for line in text.splitlines()[1:]:
        bars, name, words, _ = re.fullmatch(
            r"((?:[│ ] )*)[├└] (.+?)  +(.*?) *((?:\d+ × )?[\d,]+)", line
        ).groups()
        above = [*above[: len(bars) // 2], name]
        numbers = [int(number) for number in re.findall(r"block\.(\d+)", above[0])]
        roots = [f"block.{i}" for i in range(numbers[0], numbers[-1] + 1)] if numbers else above[:1]
        for key, sizes in re.findall(r"(\w+) ((?:\d[\d,]*\d|\d)(?: × [\d,]*\d)*)(?:, |$)", words):
            for root in roots:
                path = ".".join([root, *above[1:], key])
                assert path not in shapes
                shapes[path] = tuple(int(size.replace(",", "")) for size in sizes.split(" × "))
    return shapes


def shapes_of(model):
    """Dotted path → shape, under the names of sites."""
    paths = {
        re.sub(r"^blocks", "block", path): leaf.shape for path, leaf in parameters(model).items()
    }
    return {re.sub(r"^head\b", "logits", path): shape for path, shape in paths.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_parameter_is_there_once(case):
    model = jax.eval_shape(lambda: models.build(config_of(case), nnx.Rngs(0)))
    text = jmat.tree(model)
    assert shapes_in(text) == shapes_of(model)
    total = sum(leaf.size for leaf in jax.tree.leaves(model))
    assert text.startswith(f"Transformer: {total:,} parameters, float32\n")
    assert ("table of embed.tokens" in text) == model.config.tied_head
    top = re.findall(r"^[├└] (\S+)", text, re.MULTILINE)
    blocks = text[text.index("block.0") :]
    inside = {f"block.0.{name}" for name in re.findall(r"^│ [├└] (\S+)", blocks, re.MULTILINE)}
    assert {*top, *inside} <= readable(model.config.layers, model.config.heads).keys()
    assert inside == {f"block.0.{name}" for name in SUBMODULES}


def test_blocks_of_one_shape_share_a_line(gpt2, bert):
    for model in (gpt2, bert):
        assert shapes_in(jmat.tree(model)) == shapes_of(model)
    lines = jmat.tree(gpt2).splitlines()
    assert re.fullmatch(r"├ block\.0 … block\.3 +4 × 49,984", lines[4])
    assert re.fullmatch(r"│ ├ attn +16,640", lines[6])
    assert re.fullmatch(r"│ │ ├ q +kernel 64 × 64, bias 64 +4,160", lines[7])
    assert re.fullmatch(r"└ logits +table of embed\.tokens +0", lines[-1])
    assert re.fullmatch(r"├ final_norm +no parameters +0", jmat.tree(bert).splitlines()[-4])


def test_other_blocks_have_lines_of_their_own(gpt2):
    config = gpt2.config
    model = jax.eval_shape(lambda: models.build(config, nnx.Rngs(0)))
    model.blocks[2].ffn.up = model.blocks[1].attn.q
    names = re.findall(r"^├ (block\S+(?: … \S+)?)", jmat.tree(model), re.MULTILINE)
    assert names == ["block.0 … block.1", "block.2", "block.3"]


def test_a_model_without_a_head_says_so():
    config = dataclasses.replace(config_of(CASES[0]), has_head=False)
    model = jax.eval_shape(lambda: models.build(config, nnx.Rngs(0)))
    assert re.fullmatch(r"└ logits +no language-model head +0", jmat.tree(model).splitlines()[-1])
