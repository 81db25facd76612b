"""What does a model already predict at each layer of *this* sentence?

    python -m experiments.peek --model=gpt2-docs
    python -m experiments.peek --model=bert-docs --sentences="The function returns a new [MASK]." --layers=0,3,6

Reads every position of the sentences at every layer, directly (`id`) and through a linear map to the final layer
(`mat`): the next token for GPT-2; for BERT the token at each position, which are masked in turn. Prints the top tokens
at the last word (at the mask, if a sentence has one), and writes all of them to peek.json and results.json, and as a
page for the browser, peek.html. Maps are fitted first, which takes a minute or two on two CPU cores with the bundled
models; with --maps=FOLDER those that `experiments.layer_jump` saved there are used. Expect `mat` to name sensible words
from the first layers on, where `id` still repeats its input.
"""

import json
import pathlib
from typing import Any

from absl import flags

from experiments import cli, common
from jmat.capture.activations import capture
from jmat.data.corpus import sentences_fingerprint
from jmat.data.encoding import check_text
from jmat.data.examples import mask_positions
from jmat.forward import logits
from jmat.maps.files import read_maps
from jmat.maps.jumps import fit_jumps
from jmat.maps.types import Identity, Linear
from jmat.metrics.predictions import Predictions
from jmat.models.sites import stream_sites
from jmat.report.notes import noted
from jmat.runtime.checks import chosen_layers
from jmat.runtime.files import save_atomically
from jmat.studies.fitting import announce_ranks, read_sites
from jmat.studies.peek.page import page
from jmat.studies.peek.predictions import all_positions, check_top, format_peek, peek, peek_rows
from jmat.studies.settings import Settings

flags.adopt_module_key_flags(common)
_SENTENCES = flags.DEFINE_multi_string(
    "sentences",
    None,
    "A sentence to look at, for masked models with [MASK] or without; repeat the flag for more. Default: three as "
    "docstrings have them.",
)
_LAYERS = flags.DEFINE_list("layers", [], "Layers to read, such as 0,4,8; default: all. The last one is always there.")
_TOP = flags.DEFINE_integer("top", 5, "Number of the most probable tokens to show.", lower_bound=1)
_MAPS = flags.DEFINE_string("maps", None, "Folder with maps that layer_jump saved for this model; default: fit them.")

WRITES = ("peek.json", "peek.html")
_READ = 256  # positions at which the full model's predictions are compared with one another

DEFAULT_SENTENCES = (
    "Return a new array of the same ___ as the input.",
    "If the file does not ___, an error is raised.",
    "The first argument is the name of the ___ to call.",
)


def main(argv: list[str]) -> None:
    """Runs the experiment."""
    del argv
    for sentence in _SENTENCES.value or ():
        check_text(sentence, "--sentences")
    job = common.start("peek", writes=WRITES, reads=("maps",))
    L = job.model.config.layers
    check_top(_TOP.value, job.model.config)
    layers = sorted({*chosen_layers(_LAYERS.value, L), L})
    masked = job.mask_token is not None
    if job.tokenizer is None:
        raise ValueError(f"{job.config['model']} has no tokenizer, which it takes to read sentences.")
    sentences = _SENTENCES.value or [without_gap(text, job.tokenizer, masked) for text in DEFAULT_SENTENCES]
    split = all_positions(sentences, job.tokenizer, max_length=job.model.config.num_positions, masked=masked)
    linear = saved_maps(job, _MAPS.value, layers) if _MAPS.value else fitted_maps(job)
    acts = capture(job.model, mask_positions(split, job.mask_token), stream_sites(L))
    shortcuts: dict[str, dict[int, Any]] = {
        "id": {layer: Identity() for layer in layers},
        "mat": {layer: linear[layer] if layer < L else Identity() for layer in layers},
    }
    streams = [acts[site] for site in stream_sites(L)]
    name = pathlib.Path(job.config["model"]).name
    found = peek(job.model, job.tokenizer, sentences, split, streams, shortcuts, name=name, top=_TOP.value)
    read = {"maps": _MAPS.value} if _MAPS.value else job.text()
    predictions = Predictions()
    predictions.add(logits(job.model, streams[L][:_READ]))
    rows = noted(peek_rows(found), predictions.note())
    job.finish(rows, text={**read, "sentences": sentences_fingerprint(sentences)})
    text = json.dumps(found, ensure_ascii=False, indent=1) + "\n"
    save_atomically(job.path("peek.json"), lambda path: path.write_text(text, "utf-8"))
    save_atomically(job.path("peek.html"), lambda path: path.write_text(page(found), "utf-8"))
    for number in range(len(found["sentences"])):
        print(format_peek(found, number), end="\n\n")
    cli.print_notes(rows)
    print(f"wrote {job.out}/results.json, peek.json; open {job.out}/peek.html in a browser")


def without_gap(text: str, tokenizer: Any, masked: bool) -> str:
    """A causal model is given what stands before the gap, a masked one the whole with its mask in the gap."""
    before, after = text.split("___")
    return before + tokenizer.mask_token + after if masked else before.rstrip()


def saved_maps(job: common.Job, folder: str, layers: list[int]) -> dict[int, Linear]:
    """The maps of a folder from the layers to the final one; refused if they are another model's."""
    config = job.model.config
    maps, _ = read_maps(folder, model_hash=job.model_hash, width=config.width)
    names = {layer: f"mat.{layer}.{config.layers}" for layer in layers if layer < config.layers}
    if missing := [name for name in names.values() if name not in maps]:
        raise ValueError(f"{folder} has no map {missing[0]}; expected what experiments.layer_jump saves.")
    return {layer: maps[name] for layer, name in names.items()}


def fitted_maps(job: common.Job) -> dict[int, Linear]:
    """New maps from every layer to the final one."""
    sites = stream_sites(job.model.config.layers)
    fit = read_sites(job.subject, job.examples.fit, sites, job.options(Settings), "fit")
    maps, solutions = fit_jumps(
        [fit[site] for site in sites], targets="final", intercept=job.config["intercept"], progress="fit"
    )
    announce_ranks(job.subject, solutions)
    return {layer: linear for (layer, _), linear in maps.items()}


if __name__ == "__main__":
    cli.run(main)
