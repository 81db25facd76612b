"""`jmat.tune_draft`: which draft writes fastest, from what a model accepts and from what its
passes cost.

Texts are written once, by the whole model. What each draft would have saved of that is
counted (`jmat.decode.acceptance`), which two runs find alike. The clock comes in by the
costs alone (`jmat.decode.costs`), and by a race of the best draft against plain decoding.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32
from numpy import ndarray

from jmat.capture.activations import capture
from jmat.data.batches import Batch
from jmat.data.encoding import Tokenizer
from jmat.data.examples import Split
from jmat.data.reading import every_token
from jmat.decode.acceptance import Counted, counted, read_texts, right_copies, right_guesses
from jmat.decode.costs import Costs, DraftStep, measure_costs, speed_up
from jmat.decode.draft import Draft, check_tokens, words_of
from jmat.decode.generate import generate
from jmat.decode.lookup import Lookup
from jmat.decode.options import check_lengths
from jmat.decode.prompts import Prompts, prompt_ids
from jmat.decode.tuned import LOOKUP, Race, Row, TunedDraft
from jmat.decode.words import frequent_words
from jmat.maps.carry import Carry, solve_carry
from jmat.maps.kinds import AFFINE, fit_kind, parse_kind
from jmat.maps.metric import head_metric
from jmat.maps.regression import Regression, pair_moments
from jmat.models.cache import check_causal
from jmat.models.family import Transformer, check_model
from jmat.models.sites import Site, stream_sites
from jmat.models.stack import check_head
from jmat.runtime.annotations import Keywords
from jmat.runtime.checks import check_several, check_whole, whole
from jmat.runtime.shapes import rung
from jmat.runtime.timing import in_turn

CARRY = "carry"


def tune_draft(
    model: Transformer,
    prompts: Prompts,
    texts: Sequence[str] | Split | Batch,
    *,
    tokenizer: Tokenizer | None = None,
    layers: Sequence[int] | None = None,
    tokens: Sequence[int] = (1, 2, 4),
    kinds: Sequence[str] = (AFFINE, CARRY),
    words: Sequence[int] = (512,),
    lookup: bool = True,
    max_new_tokens: int = 64,
    turns: int = 5,
    race: int = 3,
    progress: str | None = None,
) -> TunedDraft:
    """Finds the draft with which a model writes greedy text fastest behind prompts, and
    whether it is faster than plain decoding at all.

    Args:
      model: as `jmat.load` returns it; a causal one with a head, of two blocks at least.
      prompts: as `jmat.generate` takes them; they are written on together.
      texts: on which maps are fitted and words counted.
      tokenizer: reads texts.
      layers: that draft, of 1 .. L − 1; None: 1, a quarter and half of the blocks, and
        L − 1.
      tokens: lengths of drafts, 1 .. 64.
      kinds: of maps: `carry`, or one in closed form, such as `affine` or `ridge:1e-2`.
      words: lengths of short lists of frequent words that are tried beside the whole
        vocabulary.
      lookup: whether copies of the text so far are tried, too.
      max_new_tokens: of a text.
      turns: how often each program is timed.
      race: how often the best draft and plain decoding are timed against one another; a
        draft that is slower is not returned; 0: never.
      progress: label of the progress bar of capturing; by default none is shown.

    Raises:
      ValueError: numbers out of range; a kind that has no closed form; as `jmat.generate`
        and `jmat.fit_map`.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> texts = [f"Entry {i} holds a list of {i % 7} values." for i in range(40)]
      >>> tuned = jmat.tune_draft(
      ...     model,
      ...     ["Return a new"],
      ...     texts,
      ...     tokenizer=tokenizer,
      ...     layers=[2],
      ...     tokens=[2],
      ...     max_new_tokens=8,
      ...     turns=1,
      ...     race=0,
      ... )
      >>> [row["kind"] for row in tuned.rows if row["words"] == 0].count("lookup")
      1
      >>> verdict = tuned.verdict
    """
    check_model(model)
    config = model.config
    check_causal(config)
    check_head(model, None)
    chosen = _layers(layers, config.layers)
    for name, several in (("tokens", tokens), ("kinds", kinds), ("words", words)):
        check_several(name, several)
    lengths = [whole("tokens", length) for length in tokens]
    for length in lengths:
        check_tokens(length)
    if not lengths or not kinds:
        raise ValueError("no length of drafts, or no kind of map: give one of each at least.")
    for kind in kinds:
        _check_kind(kind, config.width)
    for count in words:
        check_whole("words", count, 1)
    for name, value, least in (("turns", turns, 1), ("race", race, 0)):
        check_whole(name, value, least)
    check_whole("max_new_tokens", max_new_tokens, 2)
    ids = prompt_ids(prompts, tokenizer, config)
    check_lengths(ids, max_new_tokens, config)
    split = every_token(texts, tokenizer)

    maps = _fitted(model, split, chosen, kinds, progress)
    lists = [None, *(frequent_words(split, count) for count in words)]
    options: Keywords = {"tokenizer": tokenizer, "max_new_tokens": max_new_tokens}
    written = generate(model, ids, **options)
    drafts = _drafts(maps, lists, lengths, lookup)
    counts = _counts(model, ids, written.tokens, drafts)
    costs = _costs(model, ids, max_new_tokens, drafts, turns)
    rows = [_row(key, counts[key], costs) for key in drafts]
    order = sorted(range(len(rows)), key=lambda index: -float(rows[index]["speed_up"]))
    best = list(drafts.values())[order[0]]
    tuned = TunedDraft(best, [rows[index] for index in order], costs.plain)
    if float(tuned.rows[0]["speed_up"]) <= 1:
        return dataclasses.replace(tuned, draft=None)
    if not race:
        return tuned
    works = {
        "plain": lambda: generate(model, ids, **options).tokens,
        "draft": lambda: generate(model, ids, draft=best, **options).tokens,
    }
    works["draft"]()  # compiles
    taken = in_turn(works, race)
    factors = [a / b for a, b in zip(taken["plain"], taken["draft"], strict=True)]
    found = Race(statistics.median(factors), min(factors), max(factors))
    return dataclasses.replace(tuned, race=found, draft=best if found.median > 1 else None)


class _Key(NamedTuple):
    """Names a draft: its kind, its layer, the number of words (0: all), its tokens."""

    kind: str
    layer: int
    words: int
    tokens: int


def _layers(given: Sequence[int] | None, L: int) -> list[int]:
    """Returns the layers that draft. Raises ValueError where one is out of range."""
    if L == 1:
        raise ValueError("a model of one block has no other blocks to check its drafts.")
    if given is None:
        return sorted({1, max(L // 4, 1), max(L // 2, 1), L - 1})
    check_several("layers", given)
    layers = list(dict.fromkeys(whole("layer", layer) for layer in given))
    if not layers:
        raise ValueError("layers: no layer drafts; give one at least.")
    for layer in layers:
        if not 1 <= layer < L:
            raise ValueError(f"layers: a draft from layer {layer}: expected 1 to {L - 1}.")
    return layers


def _check_kind(name: str, width: int) -> None:
    """Raises ValueError for a kind of map that is not solved for in closed form."""
    if name == CARRY:
        return
    kind = parse_kind(name)
    kind.check_width(width, width)
    if not kind.fits_a_pair:
        raise ValueError(
            f"kind {name!r} is no closed form of one layer; give {CARRY!r}, or a kind such as "
            f"{AFFINE!r}."
        )


def _fitted(
    model: Transformer,
    split: Split,
    layers: Sequence[int],
    kinds: Sequence[str],
    progress: str | None,
) -> dict[tuple[str, int], Site | Carry]:
    """Returns maps by kind and layer, from one pass over the texts."""
    L = model.config.layers
    sites = stream_sites(L)
    split = split.with_examples(np.ones(len(split.tokens), bool))
    acts = capture(model, split, [sites[layer] for layer in (*layers, L)], progress=progress)
    final, later = acts[sites[L]], np.flatnonzero(split.positions > 0)
    if CARRY in kinds and not later.size:
        raise ValueError("no text has two tokens, of which a carry predicts the second.")
    maps: dict[tuple[str, int], Site | Carry] = {}
    for layer in layers:
        stream = acts[sites[layer]]
        closed = [name for name in dict.fromkeys(kinds) if name != CARRY]
        needs_head = any(parse_kind(name).entry.needs_head for name in closed)
        metric = head_metric(model, final.mean(0)) if needs_head else None
        pair = Regression(pair_moments(stream, final), metric) if closed else None
        for name in dict.fromkeys(kinds):
            if name == CARRY:
                maps[name, layer] = solve_carry(stream, final, later)[1]
            elif pair is not None:
                maps[name, layer] = fit_kind(parse_kind(name), pair)
    return maps


def _drafts(
    maps: Mapping[tuple[str, int], Site | Carry],
    lists: Sequence[Int[ndarray, " W"] | None],
    tokens: Sequence[int],
    lookup: bool,
) -> dict[_Key, Draft | Lookup]:
    """Returns all drafts that are compared."""
    drafts: dict[_Key, Draft | Lookup] = {}
    for length in dict.fromkeys(tokens):
        for (kind, layer), stand_in in maps.items():
            for words in lists:
                key = _Key(kind, layer, 0 if words is None else len(words), length)
                drafts[key] = Draft(layer, stand_in, tokens=length, words=words)
        if lookup:
            drafts[_Key(LOOKUP, 0, 0, length)] = Lookup(tokens=length)
    return drafts


def _counts(
    model: Transformer,
    ids: Sequence[Int32[ndarray, " _"]],
    tokens: Sequence[Int32[ndarray, " _"]],
    drafts: Mapping[_Key, Draft | Lookup],
) -> dict[_Key, Counted]:
    """Returns what would become of each draft in texts that the model wrote."""
    layers = dict.fromkeys(key.layer for key in drafts if key.layer)
    texts = read_texts(model, ids, tokens, [*layers, model.config.layers])
    depth = max(key.tokens for key in drafts)
    counts: dict[_Key, Counted] = {}
    by_map: dict[tuple[str, int], dict[_Key, Draft]] = {}
    for key, draft in drafts.items():
        if isinstance(draft, Lookup):
            right, there = right_copies(texts, draft)
            counts[key] = counted(texts, right, key.tokens, there)
        else:
            by_map.setdefault((key.kind, key.layer), {})[key] = draft
    for several in by_map.values():
        # One list of words a number of them: they are the same for all lengths of drafts.
        lists = {key.words: words_of(draft) for key, draft in several.items()}
        some = next(iter(several.values()))
        guesses = right_guesses(model, texts, some.layer, some.map, depth, lists.values())
        of_list = dict(zip(lists, guesses, strict=True))
        for key in several:
            counts[key] = counted(texts, of_list[key.words], key.tokens)
    return counts


def _costs(
    model: Transformer,
    ids: Sequence[Int32[ndarray, " _"]],
    new_tokens: int,
    drafts: Mapping[_Key, Draft | Lookup],
    turns: int,
) -> Costs:
    """Returns what plain steps, drafted tokens and checks cost at these prompts, half-way
    through their new texts.
    """
    steps = {
        _step(key): DraftStep(draft.layer, draft.map, words_of(draft))
        for key, draft in drafts.items()
        if isinstance(draft, Draft)
    }
    longest = max(len(row) for row in ids)
    return measure_costs(
        model,
        steps,
        [(key.layer, key.tokens) for key in drafts],
        rows=rung(len(ids)),
        length=longest + new_tokens // 2,
        room=min(rung(longest + new_tokens, 32), model.config.num_positions),
        turns=turns,
    )


def _step(key: _Key) -> str:
    """Returns the name of what drafts one token."""
    return f"{key.kind} {key.layer} {key.words}"


def _row(key: _Key, found: Counted, costs: Costs) -> Row:
    """Returns what is known of one draft."""
    counts = found.counts
    # A batch is written when its slowest text is. The first token comes with the prompt.
    slowest = int(np.argmax(counts.cycles))
    per_cycle = 1 + counts.accepted[slowest] / max(int(counts.cycles[slowest]), 1)
    drafted = int(counts.drafted.sum())
    draft = 0.0 if key.kind == LOOKUP else costs.drafts[_step(key)] / costs.plain
    check = costs.checks[key.layer, key.tokens] / costs.plain
    if key.kind == LOOKUP:  # where no text has a copy, a plain step is made
        check = found.share * check + (1 - found.share)
    return {
        **key._asdict(),
        "accepted": float(counts.accepted.sum()) / drafted if drafted else 0.0,
        "tokens_a_check": float(per_cycle),
        "draft_cost": draft,
        "check_cost": check,
        "speed_up": speed_up(float(per_cycle), key.tokens, draft, check),
    }
