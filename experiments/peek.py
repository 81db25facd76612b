"""Shows the predictions at each layer of a sentence.

    python -m experiments.peek --model=gpt2-docs
    python -m experiments.peek --model=bert-docs --layers=0,3,6 \
        --sentences="The function returns a new [MASK]."
    python -m experiments.peek --kinds=id,mat,rank:64

Reads every position of the sentences at every layer, directly (`id`) and through a
linear map to the final layer (`mat`), or through maps of other kinds: the next token
for GPT-2; for BERT the token at each position, which are masked in turn. Prints the top
tokens at the last word (at the mask, if a sentence has one), and writes all of them to
peek.json and results.json, and as a page for the browser, peek.html, which shows
entropy, KL and rank as well. Maps are fitted first, which takes a minute or two on two
CPU cores with the bundled models; with --maps=FOLDER those that
`experiments.layer_jump` or `experiments.map_zoo` saved there are used, or a lens of
another library. Expect `mat` to name sensible words from
the first layers on, where `id` still repeats its input.
"""

from absl import flags

from experiments import cli, common
from jmat.data.encoding import check_text
from jmat.studies import peek

flags.adopt_module_key_flags(common)
_SENTENCES = flags.DEFINE_multi_string(
    "sentences",
    None,
    "A sentence to look at, for masked models with [MASK] or without; repeat the flag for more. "
    "Default: three as docstrings have them.",
)
flags.DEFINE_list(
    "layers", [], "Layers to read, such as 0,4,8; default: all. The last one is always there."
)
flags.DEFINE_integer("top", 5, "Number of the most probable tokens to show.", lower_bound=1)
_MAPS = flags.DEFINE_string(
    "maps",
    None,
    "Folder with maps that layer_jump or map_zoo saved for this model, a lens of another library, "
    "or the name of one on the hub; default: fit them.",
)
flags.DEFINE_list(
    "kinds",
    [],
    "Kinds of maps, such as id,mat,rank:64; default: id and mat, or id and all kinds of --maps.",
)


def main(argv: list[str]) -> None:
    """Runs the experiment."""
    del argv
    for sentence in _SENTENCES.value or ():
        check_text(sentence, "--sentences")
    job = common.start("peek", writes=peek.FILES, options=peek.Options, reads=("maps",))
    options, sentences, maps = (
        job.options(peek.Options),
        _SENTENCES.value or None,
        _MAPS.value or None,
    )
    # before a corpus is read
    peek.check(job.model, sentences, options, tokenizer=job.tokenizer, fits=maps is None)
    examples = None if maps else job.examples
    results = peek.run(job.model, sentences, options, maps=maps, examples=examples, **job.context)
    job.publish(results, text=results.text if maps else None)


if __name__ == "__main__":
    cli.run(main)
