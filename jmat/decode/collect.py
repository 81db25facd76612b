"""Follows texts on the host while the device writes them, and collects them at the end."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32
from numpy import ndarray

from jmat.data.encoding import Tokenizer
from jmat.decode.draft import DraftCounts
from jmat.decode.exits import TokenExits
from jmat.decode.leave import Log
from jmat.decode.passes import State
from jmat.decode.result import Generated
from jmat.decode.text import Follower, OnText


def followers_of(
    ids: Sequence[Int32[ndarray, " _"]],
    tokenizer: Tokenizer | None,
    strings: Sequence[str],
    stops: Sequence[int],
    on_text: OnText | None,
) -> list[Follower]:
    """Returns what follows each text; nothing without a tokenizer."""
    if tokenizer is None:
        return []

    def follower(row: int, prompt: Int32[ndarray, " _"]) -> Follower:
        hand_on = None if on_text is None else lambda piece: on_text(row, piece)
        return Follower(tokenizer, prompt, strings, stops, hand_on)

    return [follower(row, prompt) for row, prompt in enumerate(ids)]


def followed(state: State, followers: Sequence[Follower]) -> State:
    """Returns the state in which rows with a stop string have ended; new text is handed
    on.
    """
    tokens, count, going = (np.asarray(part) for part in (state.tokens, state.written, state.going))
    for row, follower in enumerate(followers):
        follower.take(tokens[row, : count[row]], ended=not going[row])
    ended = [row for row, follower in enumerate(followers) if follower.stopped is not None]
    if not going[ended].any():
        return state
    stays = np.ones(len(going), bool)
    stays[ended] = False
    return state._replace(going=state.going & stays)


def collected(
    ids: Sequence[Int32[ndarray, " _"]],
    state: State,
    followers: Sequence[Follower],
    stops: Sequence[int],
    log: DraftCounts | Log | None,
    looked_at: tuple[int, ...],
) -> Generated:
    """Returns what was written, cut where stop strings came.

    Args:
      ids: the prompts.
      state: in which all texts have ended.
      followers: of the texts, or none.
      stops: tokens that end a text.
      log: what became of drafts, or how tokens left.
      looked_at: layers at which tokens could leave.
    """
    tokens, count = np.asarray(state.tokens), np.asarray(state.written)
    scores = None if state.scores is None else np.asarray(state.scores)
    written, reasons = [], []
    for row in range(len(ids)):
        new = tokens[row, : count[row]]
        follower = followers[row] if followers else None
        if follower is not None:
            follower.take(new, ended=True)
            new = new[: follower.stopped]
        written.append(new)
        by_string = follower is not None and follower.stopped is not None
        reasons.append(
            "stop string" if by_string else "stop token" if int(new[-1]) in stops else "length"
        )
    return Generated(
        prompts=tuple(ids),
        tokens=tuple(written),
        reasons=tuple(reasons),
        texts=tuple(follower.text for follower in followers) if followers else None,
        prompt_texts=tuple(follower.prompt for follower in followers) if followers else None,
        scores=None
        if scores is None
        else tuple(scores[row, : len(new)] for row, new in enumerate(written)),
        drafts=DraftCounts(*(np.asarray(part)[: len(ids)] for part in log))
        if isinstance(log, DraftCounts)
        else None,
        exits=_token_exits(log, looked_at, written, state, followers)
        if isinstance(log, Log)
        else None,
    )


def _token_exits(
    log: Log,
    looked_at: tuple[int, ...],
    written: Sequence[Int32[ndarray, " _"]],
    state: State,
    followers: Sequence[Follower],
) -> TokenExits:
    """Returns where the tokens of texts left."""
    layers, confidences = np.asarray(log.layers), np.asarray(log.confidences)
    return TokenExits(
        layers=tuple(layers[row, : len(new)] for row, new in enumerate(written)),
        confidences=tuple(confidences[row, : len(new)] for row, new in enumerate(written)),
        looked_at=looked_at,
        blocks=len(state.cache.blocks),
        programs=int(log.programs),
        pieces=tuple(follower.pieces() for follower in followers) if followers else None,
    )
