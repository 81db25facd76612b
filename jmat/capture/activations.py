"""Activations at the sampled positions, for any number of sites, in one pass over the
model.
"""

from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np
from jax.tree_util import DictKey
from jaxtyping import Array, Float, Int
from numpy import ndarray

from jmat.capture.reading import reading_batches
from jmat.capture.sweep import sweep
from jmat.data.batches import Batch
from jmat.data.encoding import Tokenizer
from jmat.data.examples import Examples, Split, check_tokens
from jmat.data.reading import every_token
from jmat.forward import run
from jmat.models.config import ModelConfig
from jmat.models.family import Transformer, check_model
from jmat.models.site_checks import checked_sites
from jmat.models.sites import Site, is_square, kept_names
from jmat.runtime.annotations import PyTree
from jmat.runtime.checks import check_whole, whole
from jmat.runtime.mesh import local_mesh, place, replicate, usual_batch


class Origin:
    """Says where the rows of activations come from; compares and hashes by its
    numbers.

    Attributes:
      sentence: [N]; index of the text that each row comes from.
      position: [N]; index of its token in that text, from 0.
    """

    def __init__(self, sentence: Int[ndarray, " N"], position: Int[ndarray, " N"]):
        self.sentence, self.position = sentence, position

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Origin):
            return NotImplemented
        same = np.array_equal(self.sentence, other.sentence)
        return same and np.array_equal(self.position, other.position)

    def __hash__(self) -> int:
        return hash((self.sentence.tobytes(), self.position.tobytes()))


@jax.tree_util.register_pytree_with_keys_class
class Activations(dict[str, Float[ndarray, "N W"]]):
    """Holds activations by site, one row an example, in the order of the input.

    It is a pytree: `jax.tree.map` changes the arrays, and the result has the same
    `sentence` and `position`.

    Attributes:
      origin: `sentence` and `position`.
    """

    def __init__(self, values: Mapping[str, ndarray], split: Split):
        super().__init__(values)
        self.origin = Origin(split.rows, split.positions)

    @property
    def sentence(self) -> Int[ndarray, " N"]:
        """Returns the index of the text that each row comes from, [N]."""
        return self.origin.sentence

    @property
    def position(self) -> Int[ndarray, " N"]:
        """Returns the index of each row's token in its text, from 0, [N]."""
        return self.origin.position

    def tree_flatten_with_keys(
        self,
    ) -> tuple[list[tuple[DictKey, PyTree]], tuple[tuple[str, ...], Origin]]:
        return [(DictKey(site), values) for site, values in self.items()], (
            tuple(self),
            self.origin,
        )

    @classmethod
    def tree_unflatten(
        cls, kept: tuple[tuple[str, ...], Origin], values: Iterable[PyTree]
    ) -> "Activations":
        activations = cls.__new__(cls)
        activations.update(zip(kept[0], values, strict=True))
        activations.origin = kept[1]
        return activations


def capture(
    model: Transformer,
    inputs: Split | Batch | Sequence[str],
    keep: str | Iterable[str],
    *,
    tokenizer: Tokenizer | None = None,
    sites: Mapping[str, Site] | None = None,
    stop: int | None = None,
    tokens_per_batch: int | None = None,
    devices: Sequence[jax.Device] | None = None,
    progress: str | None = None,
) -> Activations:
    """Reads sites at every token of texts, or at every example of a split.

    Args:
      model: as `jmat.load` returns it.
      inputs: texts or a batch (`jmat.encode`), of which every token is read; or a
        split: sentences and the positions at which to read them, one example a
        position. A masked model reads tokens as they are; for masked positions see
        `jmat.data.examples.mask_positions`.
      keep: one name or several, with `*` for part of a name; W is D for most sites
        (`jmat.models.sites`). Attention scores and patterns are read by `jmat.run`.
      tokenizer: reads texts.
      sites: what stands in for parts of the model, as for `jmat.run`.
      stop: the block to stop before, where nothing behind it is read; all blocks by
        default.
      tokens_per_batch: padded tokens in one forward pass; default:
        `jmat.runtime.mesh.usual_batch`.
      devices: default, all local ones.
      progress: label of the progress bar; by default none is shown.

    Returns:
      Site → values in the order of the tokens or examples, float32, on the host; on
      every host all of them. `sentence` and `position` say where each row comes from.

    Raises:
      ValueError: a token id outside the embedding, a sentence longer than the
        positions, NaN or infinity in what was read.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> batch = jmat.encode(tokenizer, ["Return a new array", "The default is None"])
      >>> acts = jmat.capture(model, batch, ["block.3", "block.7"])
      >>> acts["block.3"].shape, acts.position.tolist()
      ((8, 192), [0, 1, 2, 3, 0, 1, 2, 3])
    """
    check_model(model)
    last = model.config.layers if stop is None else whole("stop", stop)
    split = every_token(inputs, tokenizer)
    check_tokens(split.tokens, model.config.vocab_size)
    asked = kept_names(keep, model.config, 0, last)
    keep = tuple(dict.fromkeys(asked.values()))
    sites = checked_sites(sites, model.config, 0, last)
    if square := [name for name in keep if is_square(name)]:
        raise ValueError(
            f"{square[0]!r} has a value for every pair of tokens: read it with jmat.run, "
            f"keep={square[0]!r}."
        )
    if tokens_per_batch is not None:
        check_whole("tokens_per_batch", tokens_per_batch, 1)
    mesh = local_mesh(devices)
    model, sites = place(model, mesh), replicate(mesh, sites)
    size = tokens_per_batch or usual_batch(devices)
    # What stands in for attention might look at all tokens of a row: each sentence has its own.
    plan = reading_batches(model.config, split, size, row_multiple=mesh.size, alone=bool(sites))

    def read(batch: Batch) -> dict[str, Array]:
        return run(
            model,
            batch.tokens,
            keep=keep,
            sites=sites,
            stop=stop,
            read_at=batch.read_at,
            **batch.where,
        )[1]

    values = sweep(plan, read, mesh=mesh, progress=progress)
    # in the order asked for, not in that of the alphabet
    values = {name: values[site] for name, site in asked.items()}
    check_finite(values)
    return Activations(values, split)


def check_examples(examples: Examples, config: ModelConfig) -> None:
    """Raises ValueError for tokens that the model does not have and for sentences
    longer than its positions.
    """
    for name, split in (("fit", examples.fit), ("eval", examples.eval)):
        check_tokens(split.tokens, config.vocab_size)
        longest = int(split.lengths.max(initial=0))
        if longest > config.num_positions:
            raise ValueError(
                f"the longest {name} sentence has {longest} tokens; the model has positions for "
                f"{config.num_positions}: cut the sentences."
            )


def check_finite(values: dict[str, Float[ndarray, "N W"]]) -> None:
    """Raises ValueError naming the first site, in the order captured, that holds NaN or
    infinity.
    """
    for name, value in values.items():
        with np.errstate(all="ignore"):
            sums = value @ np.ones(value.shape[-1], np.float32)
        # NaN and infinity stay in a sum, which is faster than to look at each number
        if np.isfinite(sums).all():
            continue
        bad = ~np.isfinite(value).all(-1)
        if bad.any():
            raise ValueError(
                f"site {name!r} is not finite at {bad.sum()} of {len(bad)} examples (the first is "
                f"example {int(bad.argmax())}); the weights are damaged, or the dtype overflows: "
                "try --dtype=float32."
            )
