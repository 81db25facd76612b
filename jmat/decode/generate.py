"""`jmat.generate`: texts behind prompts, written by a causal model with a cache."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Int32
from numpy import ndarray

from jmat.data.encoding import Tokenizer
from jmat.decode.collect import collected, followed, followers_of
from jmat.decode.draft import Draft, DraftCounts, check_draft
from jmat.decode.exit_checks import check_exits
from jmat.decode.exits import Exits
from jmat.decode.leave import Log, new_log, write_leaving
from jmat.decode.lookup import Lookup
from jmat.decode.options import check_lengths, checked_stops, checked_strings, writing_sites
from jmat.decode.passes import Rules, State, first, read_prompts, usual_piece, write
from jmat.decode.plan import looks_of
from jmat.decode.prompts import Prompts, padded_rows, prompt_ids
from jmat.decode.result import Generated
from jmat.decode.sample import checked_law
from jmat.decode.speculate import begin, drafter_of, plan_of, write_drafted
from jmat.decode.text import Follower, OnText
from jmat.models.cache import NOWHERE, check_causal, new_cache
from jmat.models.family import Transformer, check_model
from jmat.models.inputs import Spans
from jmat.models.settling import settle
from jmat.models.sites import Site
from jmat.models.stack import check_head
from jmat.runtime.checks import check_flag, check_seed, check_whole
from jmat.runtime.mesh import settled
from jmat.runtime.shapes import rung

_LOOK_EVERY = 8  # tokens after which the host looks for stop strings
_MOST_ROWS = 32  # up to which rows are padded to few numbers


def generate(
    model: Transformer,
    prompts: Prompts,
    *,
    tokenizer: Tokenizer | None = None,
    max_new_tokens: int = 50,
    temperature: float | int = 0.0,
    top_k: int | None = None,
    top_p: float | int | None = None,
    min_p: float | int | None = None,
    repetition_penalty: float | int | None = None,
    stop_tokens: Sequence[int] | None = None,
    stop_strings: str | Sequence[str] = (),
    seed: int = 0,
    scores: bool = False,
    sites: Mapping[str, Site] | None = None,
    draft: Draft | Lookup | None = None,
    exits: Exits | None = None,
    on_text: OnText | None = None,
) -> Generated:
    """Writes on behind prompts with a causal model, one token after another.

    Prompts are read in one pass, and then one token a step: a cache holds the keys and
    values of those before. All steps run in one program on the device, which other
    lengths, numbers and values compile nothing new for, up to the next size of the
    cache.

    Args:
      model: as `jmat.load` returns it; a causal one with a head.
      prompts: texts; chats, which are lists of messages `{"role": …, "content": …}` and
        go through the tokenizer's chat template; token ids; or a batch of `jmat.encode`.
        One prompt may stand by itself. They may have any lengths.
      tokenizer: reads texts and writes the new ones; without it, ids are written alone.
      max_new_tokens: the number of tokens after which a text ends.
      temperature: divides the logits before a token is drawn; 0 always takes the most
        likely one.
      top_k: draw from so many most likely tokens; None: all.
      top_p: draw from the most likely tokens that together have this probability.
      min_p: draw from tokens with at least this share of the most likely one's
        probability.
      repetition_penalty: makes tokens less likely that the text has already, where it
        is above 1: positive logits are divided by it, negative ones multiplied.
      stop_tokens: ids that end a text; by default the end of text of the model and of
        the tokenizer. An empty list: none.
      stop_strings: a text, or several, that end a text.
      seed: of random numbers. A row's text depends on the seed and on its place among
        the prompts, not on the other rows.
      scores: whether to return each new token's log-probability.
      sites: what to change in the model, as `jmat.run` takes it, when prompts are read
        and at every step. Positions of `At` count from a prompt's first token, new
        tokens included; negative ones have no meaning here. Functions see [B, T, …],
        with T = 1 at a step without a draft.
      draft: drafts several tokens by the first blocks (`jmat.Draft`) or by copies of the
        text so far (`jmat.Lookup`), which the other blocks check in one pass; the text, or
        its law, stays that of the whole model up to rounding. Blocks that check see
        several tokens at a step.
      exits: lets tokens leave at the first layer that is sure enough (`jmat.Exits`).
        Scores are then those of the layer that predicts.
      on_text: called with the number of the prompt and a piece of its new text, as soon
        as it is certain.

    Raises:
      ValueError: a masked model, or one without a head; no prompts, or an empty one;
        more tokens than the model has positions for; texts, chats, stop strings or
        `on_text` without a tokenizer; options out of range; sites as `jmat.run` refuses
        them.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> found = jmat.generate(model, "Return a new", tokenizer=tokenizer, max_new_tokens=3)
      >>> len(found.texts), len(found.tokens[0])
      (1, 3)
    """
    check_model(model)
    config = model.config
    check_causal(config)
    sites = writing_sites(model, sites)
    check_head(model, sites.get("logits"))
    check_whole("max_new_tokens", max_new_tokens, 1)
    law = checked_law(temperature, top_k, top_p, min_p, repetition_penalty)
    if draft is not None:
        if not isinstance(draft, Lookup):
            check_draft(draft, model, sites)
        if law.repetition_penalty is not None:
            raise ValueError(
                "repetition_penalty changes with every token, and drafts are checked together: "
                "leave out one of the two."
            )
    if exits is not None:
        check_exits(exits, model, sites)
        if draft is not None:
            raise ValueError(
                "draft keeps the whole model's text and exits changes it: leave out one of the two."
            )
    check_seed(seed)
    check_flag("scores", scores)
    strings = checked_strings(stop_strings, on_text, tokenizer)
    stops = checked_stops(stop_tokens, tokenizer, config)
    ids = prompt_ids(prompts, tokenizer, config)
    check_lengths(ids, max_new_tokens, config)
    placed = {
        name: settle(name, site, model, Spans(None, len(ids), NOWHERE).columns)
        for name, site in sites.items()
    }
    rules = Rules(
        law=law,
        sites=placed,
        stops=np.asarray([*stops, *[-1] * (rung(len(stops) + 1, 4) - len(stops))], np.int32),
        most=np.int32(max_new_tokens),
        key=jax.random.key(seed),
    )
    followers = followers_of(ids, tokenizer, strings, stops, on_text)
    looks = bool(strings) or on_text is not None
    looking = followers if looks else []
    each = on_text is not None
    state, log = _run(model, ids, rules, looking, scores, draft=draft, exits=exits, each=each)
    looked_at = () if exits is None else exits.looked_at(config)
    return collected(ids, state, followers, stops, log, looked_at)


def _run(
    model: Transformer,
    ids: Sequence[Int32[ndarray, " _"]],
    rules: Rules,
    followers: Sequence[Follower],
    scores: bool,
    *,
    draft: Draft | Lookup | None,
    exits: Exits | None,
    each: bool,
) -> tuple[State, DraftCounts | Log | None]:
    """Returns the state in which all texts have ended, and what became of drafts, or
    how tokens left.

    Args:
      model: with checked inputs.
      ids: the prompts.
      rules: what decides the tokens.
      followers: of texts that are looked at on the way; each a row's.
      scores: whether log-probabilities are kept.
      draft: drafts tokens; None: each is written by the whole model.
      exits: let tokens leave; not with a draft.
      each: whether every token is looked at, not every eighth.
    """
    config, count, most = model.config, len(ids), int(rules.most)
    rows = rung(count) if count <= _MOST_ROWS and not rules.sites else count
    lengths = np.zeros(rows, np.int32)
    lengths[:count] = [len(row) for row in ids]
    tokens = padded_rows(ids, rows)
    room = min(rung(int(lengths.max()) + most, 32), config.num_positions)
    cache = new_cache(model, rows, room)
    x, cache = read_prompts(model, tokens, lengths, cache, rules.sites, usual_piece(rows))
    drafting = None
    if draft is not None:
        drafting, cache = begin(draft, model, x, tokens, lengths, cache, rules.sites)
    size = rung(most, 16)
    state = State(
        cache=cache,
        tokens=jnp.zeros((rows, size), jnp.int32),
        scores=jnp.zeros((rows, size)) if scores else None,
        written=jnp.zeros(rows, jnp.int32),
        going=jnp.asarray(lengths > 0),
        seen=None
        if rules.law.repetition_penalty is None
        else jnp.asarray(_seen(ids, rows, config.vocab_size)),
    )
    leaves, structure = jax.tree.flatten(model)
    where = cache.blocks[0].keys.sharding
    over = where if isinstance(where, NamedSharding) and where.mesh.size > 1 else None
    # Several devices agree in every step on whether to go on, and such programs must not overlap.
    x, drafting, state = settled((x, drafting, state), over)
    state = settled(first(leaves, structure, state, x, rules, rows=over), over)
    log, looks, leaving = None, None, None
    if exits is not None:
        looks, leaving = looks_of(exits, config)
        log = settled(new_log(model, state, leaving), over)
    done = 1
    while True:
        if followers:
            state = followed(state, followers)
        if done >= most or (followers and not np.asarray(state.going).any()):
            return state, log if drafting is None else drafting.counts
        done = min(done + (1 if each else _LOOK_EVERY), most) if followers else most
        until = np.int32(done)
        if draft is not None and drafting is not None:
            state, drafting = settled(
                write_drafted(
                    leaves,
                    structure,
                    state,
                    drafting,
                    rules,
                    drafter_of(draft),
                    until,
                    plan=plan_of(draft),
                    rows=over,
                ),
                over,
            )
        elif looks is not None and leaving is not None:
            state, log = settled(
                write_leaving(
                    leaves, structure, state, log, rules, looks, until, plan=leaving, rows=over
                ),
                over,
            )
        else:
            state = settled(write(leaves, structure, state, rules, until, rows=over), over)


def _seen(ids: Sequence[Int32[ndarray, " _"]], rows: int, vocab_size: int) -> ndarray:
    seen = np.zeros((rows, vocab_size), bool)
    for row, prompt in enumerate(ids):
        seen[row, prompt] = True
    return seen
