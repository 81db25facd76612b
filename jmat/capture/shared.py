"""Keeps activations of one model, so that several studies of it share a pass over their
text.
"""

from collections.abc import Collection, Sequence

from jaxtyping import Float
from numpy import ndarray

from jmat.capture.activations import capture
from jmat.data.examples import Split, fingerprint
from jmat.models.family import Transformer

_Key = tuple[str, int | None, str]  # fingerprint of the split, tokens in a forward pass, site


class SharedActivations:
    """Reads each site of a model at each text once, and keeps its activations.

    Memory: 4 bytes for each coordinate of each site at each example, until `keep_only`
    drops it.

    Attributes:
      model: the model that is read.
      passes: number of passes over the model so far.
    """

    def __init__(self, model: Transformer) -> None:
        """Takes a model, and reads nothing yet."""
        self.model = model
        self.passes = 0
        self._values: dict[_Key, Float[ndarray, "N _"]] = {}

    def read(
        self,
        split: Split,
        keep: Sequence[str],
        *,
        tokens_per_batch: int | None = None,
        progress: str | None = None,
    ) -> dict[str, Float[ndarray, "N _"]]:
        """Returns activations by site, in the order of `keep`; arguments and errors as
        for `capture`.

        Those that are not here yet are read, all in one pass. The arrays cannot be
        written to.
        """
        text = fingerprint(split)
        missing = [site for site in keep if (text, tokens_per_batch, site) not in self._values]
        if missing:
            self.passes += 1
            read = capture(
                self.model, split, missing, tokens_per_batch=tokens_per_batch, progress=progress
            )
            for site, values in read.items():
                # a study that changed them would change the next one's figures
                values.flags.writeable = False
                self._values[text, tokens_per_batch, site] = values
        return {site: self._values[text, tokens_per_batch, site] for site in keep}

    def keep_only(self, sites: Collection[str]) -> None:
        """Drops the activations of all other sites."""
        self._values = {key: values for key, values in self._values.items() if key[-1] in sites}
