"""Defines the flags of the text that a run reads, checks them, and makes the examples."""

from absl import flags

from experiments.cli import own_flags, say
from experiments.count_flags import ALL, define_count
from jmat.capture.activations import check_examples
from jmat.data import PROTOCOLS, hub_corpora, make_examples
from jmat.data.corpus import docs_sentences, fit_eval, named_corpus, sentences_fingerprint
from jmat.data.encoding import Tokenizer
from jmat.data.examples import Examples, count_shared, fingerprint, load_examples
from jmat.data.kinds import describe_kind
from jmat.data.pieces import draw_pieces
from jmat.models.family import Transformer
from jmat.runtime.annotations import JsonObject, Keywords
from jmat.runtime.checks import LARGEST_SEED

flags.DEFINE_string(
    "corpus",
    "docs",
    "Where sentences come from: docs (docstrings of installed packages), a text file, one a line, "
    f"or, with the extra `hub`, {', '.join(hub_corpora.SOURCES)}.",
)
flags.DEFINE_integer(
    "piece_length",
    None,
    "Cut the text file --corpus into pieces of so many characters, instead of lines, and draw "
    "those: 512 with --num_fit=128 is what arXiv 2405.12250 does with enwik8.",
    lower_bound=1,
)
flags.DEFINE_string(
    "examples", None, "Prepared examples (.npz) to use instead of a corpus; all of them are used."
)
define_count(
    "num_fit", 9000, "Sentences to fit maps on; all: what the corpus has and --num_eval leaves."
)
define_count(
    "num_eval",
    3000,
    "Other sentences to evaluate on; all: with --num_fit=all, a quarter of a text file.",
)
flags.DEFINE_integer(
    "seed", 0, "Random seed of sentences, positions and bootstrap samples.", 0, LARGEST_SEED
)
flags.DEFINE_enum(
    "protocol",
    "din2023",
    PROTOCOLS,
    "How positions are sampled. din2023: as in the paper, one a sentence, the first and special "
    "tokens, such as BOS, included. jmat: the first position and special tokens left out, any "
    "number a sentence.",
)
flags.DEFINE_integer(
    "positions_per_sentence", 1, "With --protocol=jmat: positions read a sentence.", lower_bound=1
)
flags.DEFINE_integer(
    "skip_first",
    None,
    "With --protocol=jmat: first positions left out, BOS counted; default 1, for BERT 0.",
    0,
)
flags.DEFINE_bool(
    "skip_special",
    None,
    "With --protocol=jmat: leave out special tokens; default for masked models, and where the "
    "tokenizer puts BOS in front.",
)

FLAGS = flags.FLAGS


def describe_text(source: str, examples: Examples) -> JsonObject:
    """Returns what results.json says of a text: its source and its fingerprints.

    `fit` and `eval` are fingerprints of the examples; `corpus`, for `docs`, is that of
    all sentences of the corpus, whatever the tokenizer and the number of examples.
    """
    return {
        **describe_source(source),
        "fit": fingerprint(examples.fit),
        "eval": fingerprint(examples.eval),
    }


def describe_source(source: str) -> dict[str, str]:
    """Returns the source of a text and, for `docs`, the fingerprint of the whole
    corpus.
    """
    corpus = (
        {"corpus": sentences_fingerprint(docs_sentences())}
        if named_corpus(source) == "docs"
        else {}
    )
    return {"source": source, **corpus}


def check_text_flags() -> None:
    """Raises ValueError for flags of names, positions and pieces that do not go
    together.
    """
    check_names()
    check_positions()
    if not own_flags().get("corpora"):
        check_pieces(FLAGS.examples or FLAGS.corpus)


def check_names() -> None:
    """Raises ValueError for names that are empty, or that both jmat and a file or
    folder here have.
    """
    for flag in ("model", "examples", "revision"):
        name: str | None = FLAGS[flag].value
        if name is not None and not name.strip():
            raise ValueError(f"--{flag} is empty: give a name, or leave the flag out.")
    if not FLAGS.examples and not own_flags().get("corpora"):
        named_corpus(FLAGS.corpus)


def check_pieces(source: str) -> None:
    """Raises ValueError for --piece_length with a text that is not a text file."""
    if FLAGS.piece_length and (is_prepared(source) or named_corpus(source)):
        raise ValueError(
            f"--piece_length={FLAGS.piece_length} cuts a text file, and {source} holds sentences: "
            "give a file with --corpus, or leave --piece_length out."
        )


def check_positions() -> None:
    """Raises ValueError for flags that name positions which cannot be had."""
    several, skips = (
        FLAGS.positions_per_sentence > 1,
        FLAGS.skip_first is not None or FLAGS.skip_special is not None,
    )
    mine = own_flags()
    every = "all" in (mine.get("fit_tokens"), mine.get("tokens"))
    if FLAGS.protocol != "jmat" and (several or FLAGS.skip_first or FLAGS.skip_special):
        raise ValueError(
            f"--protocol={FLAGS.protocol} reads one position a sentence and leaves no token out; "
            "--skip_first, --skip_special and --positions_per_sentence need --protocol=jmat."
        )
    if FLAGS.examples and (several or (skips and not every)):
        raise ValueError(
            f"{FLAGS.examples} holds its positions: --skip_first, --skip_special and "
            "--positions_per_sentence choose those of a corpus."
        )


def prepare_examples(model: Transformer, tokenizer: Tokenizer | None, source: str) -> Examples:
    """The examples in `source`, an .npz file, or new ones from the corpus of that name."""
    check_pieces(source)
    if is_prepared(source):
        examples = load_examples(source)
        for sentence in (
            describe_kind(examples, tokenizer, masked=not model.config.causal) if tokenizer else ()
        ):
            say(f"{source}: {sentence}")
        if shared := count_shared(examples):
            say(
                f"{source}: {shared} of {examples.eval.num_sentences} sentences to evaluate on are "
                "among those to fit on, so that the figures are not those of held-out text"
            )
    elif tokenizer is None:
        raise ValueError(f"{FLAGS.model} has no tokenizer; give prepared examples with --examples.")
    else:
        say(f"reading corpus {source}")
        reading: Keywords = {
            "protocol": FLAGS.protocol,
            "max_length": model.config.num_positions,
            "masked": not model.config.causal,
            "positions_per_sentence": FLAGS.positions_per_sentence,
            "skip_first": FLAGS.skip_first,
            "skip_special": FLAGS.skip_special,
        }
        named = named_corpus(source)
        if named in hub_corpora.SOURCES:
            check_counts("sentences of a data set on the hub are drawn")
            examples = hub_corpora.hub_examples(named, tokenizer, **draw_settings(), **reading)
        else:
            fit, held_out = draw_sentences(source)
            examples = make_examples(fit, held_out, tokenizer, seed=FLAGS.seed, **reading)
    check_examples(examples, model.config)
    return examples


def is_prepared(source: str) -> bool:
    """Returns whether a source is a file of prepared examples, and not one of
    sentences.
    """
    return source == FLAGS.examples or source.endswith(".npz")


def draw_sentences(source: str) -> tuple[list[str], list[str]]:
    """Draws sentences, or pieces of a text file, to fit on and others to evaluate on."""
    if FLAGS.piece_length:
        check_counts("pieces are drawn")
        return draw_pieces(source, FLAGS.piece_length, **draw_settings())
    return fit_eval(source, **draw_settings())


def check_counts(reason: str) -> None:
    """Raises ValueError where all sentences are asked for, and there is no telling how
    many there are.
    """
    for name in ("num_fit", "num_eval"):
        if FLAGS[name].value == ALL:
            raise ValueError(f"--{name}=all: {reason}, so give a number.")


def draw_settings() -> JsonObject:
    """Returns the numbers of sentences to draw, and the seed of the draw."""
    counts = {
        name: None if FLAGS[name].value == ALL else FLAGS[name].value
        for name in ("num_fit", "num_eval")
    }
    return {**counts, "seed": FLAGS.seed}
