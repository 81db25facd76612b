"""Measures how good the bundled models are as language models.

    python -m experiments.bundled_quality

Takes about two minutes on two cores, and answers on the held-out (`eval`) sentences of
corpus `docs`, which no model
and no n-gram has read:

- Perplexity of gpt2-docs against an interpolated modified Kneser-Ney 5-gram fitted to
  the same `train` sentences in the same tokens. Both are measured on the same tokens:
  all of a sentence but its first, and its end. The n-gram knows where a sentence
  begins.
- Accuracy: how often gpt2-docs puts the next token first, and how often bert-docs the
  token that was masked. One word piece of each sentence is masked, drawn uniformly from
  all but [CLS] and [SEP], and replaced by [MASK] always; gpt2-docs is asked for one
  token of each sentence, drawn uniformly from all but the first, the end left out.
  bert-docs sees both sides, so it should do better.
- A few continuations, to read.
"""

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments import cli, tracking
from experiments.pretraining import ngram
from jmat import forward
from jmat.checkpoint import parameters
from jmat.checkpoint.load import load
from jmat.data import corpus, splitting
from jmat.data.corpus import sentences_fingerprint
from jmat.data.encoding import Tokenizer, encode, known_id, special_id, special_tokens, text_tokens
from jmat.metrics.bootstrap import bootstrap_counts, bootstrap_mean, bootstrap_ratio
from jmat.metrics.predictions import Predictions
from jmat.models.family import Transformer
from jmat.report.notes import estimate, with_note
from jmat.report.results import write_results
from jmat.report.rows import Row
from jmat.report.tables import format_table
from jmat.runtime.checks import LARGEST_SEED
from jmat.runtime.digests import model_hash
from jmat.runtime.folders import output_path
from jmat.studies.tasks.scoring import Passage, check_causal, log_likelihoods

_GPT2 = flags.DEFINE_string("gpt2", "gpt2-docs", "Causal model: a bundled name, hub id or folder.")
_BERT = flags.DEFINE_string("bert", "bert-docs", "Masked model: a bundled name, hub id or folder.")
_CORPUS = flags.DEFINE_string("corpus", "docs", "Corpus that both models were trained on.")
_ORDER = flags.DEFINE_integer("order", 5, "Order of the n-gram.", lower_bound=1)
_SEED = flags.DEFINE_integer(
    "seed", 0, "Random seed of the tokens to predict and of continuations.", 0, LARGEST_SEED
)
_OUT = flags.DEFINE_string("out", "runs/bundled_quality", "Folder for results.json.")
_OVERWRITE = flags.DEFINE_bool(
    "overwrite",
    False,
    "Replace what a run with other flags left in --out, once there are new results.",
)
flags.adopt_module_key_flags(tracking)
_PROMPTS = ("Return the", "If the file", "This function", "The shape of", "Raises an error")
_ROWS = 32  # in one forward pass
_MOST_TOKENS = 4096  # of a sentence that the n-gram is fitted to


def perplexities(
    model: Transformer, tokenizer: Tokenizer, split: dict[str, list[str]], order: int, seed: int
) -> list[Row]:
    """Returns the perplexity of the model and of the n-gram on the same tokens of
    `eval`.

    A sentence and its end are cut at the model's longest text; all tokens but the first
    are scored. Intervals are over sentences, with the same resamples for both.
    """
    end, length = known_id(tokenizer, "eos"), model.config.num_positions
    special = special_tokens(tokenizer, masked=False)
    most = {"train": _MOST_TOKENS, "eval": length}
    encoded = {name: encode(split[name], tokenizer, size, special) for name, size in most.items()}
    ids = {
        name: [[*s.tolist(), end] for s in each if s is not None] for name, each in encoded.items()
    }
    held_out = [s[:length] for s in ids["eval"]]
    counts = np.asarray([len(s) - 1 for s in held_out], np.float64)
    passages = [Passage(np.asarray(s, np.int32), 1) for s in held_out]
    by_model = log_likelihoods(model, passages, progress="score gpt2")
    baseline = ngram.fit(ids["train"], vocab_size=model.config.vocab_size, order=order)
    by_ngram = np.asarray([log_probs[1:].sum() for log_probs in ngram.log_prob(baseline, held_out)])
    drawn = bootstrap_counts(len(counts), seed=seed)
    rows: list[Row] = []
    for name, sums in (("gpt2", by_model), (f"kneser_ney_{order}", by_ngram)):
        figures = np.exp(bootstrap_ratio(-sums, counts, drawn))
        rows.append(
            {"model": name, "metric": "perplexity", **estimate(*figures), "n": int(counts.sum())}
        )
    return rows


def accuracy(
    name: str, model: Transformer, tokenizer: Tokenizer, sentences: list[str], seed: int
) -> Row:
    """Returns the share of sentences whose drawn token the model puts first, with its
    interval.

    The token is the masked one, or the next one of a causal model.
    """
    masked = not model.config.causal
    special = special_tokens(tokenizer, masked=masked)
    first, after = len(special.before) if masked else 1, len(special.after)
    encoded = encode(sentences, tokenizer, model.config.num_positions, special)
    ids = [s for s in encoded if s is not None and len(s) > first + after]
    random = np.random.default_rng(seed)
    # BERT's first and last tokens are special; the first token of a causal model's sentence is
    # never predicted.
    places = np.asarray([random.integers(first, len(s) - after) for s in ids])
    targets = np.asarray([s[at] for s, at in zip(ids, places, strict=True)])
    tokens = np.zeros((len(ids), model.config.num_positions), np.int32)
    real = np.zeros(tokens.shape, bool)
    for i, s in enumerate(ids):
        tokens[i, : len(s)], real[i, : len(s)] = s, True
    every = np.arange(len(ids))
    if masked:
        tokens[every, places] = known_id(tokenizer, "mask")
    read_at = places if masked else places - 1
    # Long texts with long ones: little padding.
    order = np.argsort([len(s) for s in ids], kind="stable")
    correct, predictions = np.zeros(len(ids), np.float64), Predictions()
    for rows in np.array_split(order, -(-len(order) // (4 * _ROWS))):
        width = -(-max(len(ids[i]) for i in rows) // 16) * 16
        width = min(width, tokens.shape[1])
        x, _ = forward.run(model, tokens[rows, :width], mask=real[rows, :width])
        scores = forward.logits(model, x[np.arange(len(rows)), read_at[rows]])
        predictions.add(scores)
        correct[rows] = np.asarray(scores.argmax(-1)) == targets[rows]
    figures = bootstrap_mean(correct, seed=seed)
    row = {"model": name, "metric": "accuracy", **estimate(*figures), "n": len(ids)}
    return with_note(row, predictions.note())


def complete(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    temperature: float,
    key: jax.Array,
    most: int = 30,
) -> str:
    """Continues a prompt until the sentence ends; temperature 0 takes the best token
    each time.
    """
    special = special_tokens(tokenizer, masked=False)
    prompt_ids = [*special.before, *text_tokens([prompt], tokenizer, special)[0]]
    length = min(len(prompt_ids) + most, model.config.num_positions)
    tokens = np.zeros((1, length), np.int32)
    tokens[0, : len(prompt_ids)] = prompt_ids
    at = len(prompt_ids)
    while at < length:
        x, _ = forward.run(model, tokens)
        scores = forward.logits(model, x[:, at - 1])[0]
        best = scores.argmax()
        if temperature:
            best = jax.random.categorical(
                jax.random.fold_in(key, at), scores / jnp.float32(temperature)
            )
        if int(best) == known_id(tokenizer, "eos"):
            break
        tokens[0, at] = int(best)
        at += 1
    return str(tokenizer.decode(tokens[0, len(special.before) : at].tolist()))


def check_masked(model: Transformer, tokenizer: Tokenizer | None, name: str) -> Tokenizer:
    """Returns the tokenizer. Raises ValueError for a model that does not predict masked
    tokens, or has no tokenizer that knows the mask.
    """
    if model.config.causal or model.head is None:
        raise ValueError(f"{name} is no masked language model; choose one such as bert-docs.")
    if tokenizer is None or special_id(tokenizer, "mask") is None:
        raise ValueError(
            f"{name} has no tokenizer with a mask token, so nothing can be masked in a text."
        )
    return tokenizer


def main(argv: list[str]) -> None:
    """Measures, prints and writes OUT/results.json."""
    del argv
    out, seed = output_path(_OUT.value), _SEED.value
    config = {
        "gpt2": _GPT2.value,
        "bert": _BERT.value,
        "corpus": _CORPUS.value,
        "order": _ORDER.value,
        "seed": seed,
    }
    reads = ("gpt2", "bert", "corpus")
    cli.claim_folder(out, "bundled_quality", config, reads=reads, overwrite=_OVERWRITE.value)
    gpt2, gpt2_tokenizer = load(_GPT2.value)
    bert, bert_tokenizer = load(_BERT.value)
    gpt2_tokenizer = check_causal(gpt2, gpt2_tokenizer, f"--gpt2={_GPT2.value}")
    if special_id(gpt2_tokenizer, "eos") is None:
        raise ValueError(
            f"the tokenizer of --gpt2={_GPT2.value} has no token for the end of a sentence "
            "(eos_token)."
        )
    bert_tokenizer = check_masked(bert, bert_tokenizer, f"--bert={_BERT.value}")
    cli.say(f"reading corpus {_CORPUS.value}")
    sentences = corpus.load_corpus(_CORPUS.value)
    split = splitting.split(sentences)
    splitting.check_parts(split, _CORPUS.value)
    cli.say("measuring perplexity, of the model and of the n-gram")
    rows = perplexities(gpt2, gpt2_tokenizer, split, _ORDER.value, seed)
    cli.say("measuring accuracy, of both models")
    rows.append(accuracy("gpt2", gpt2, gpt2_tokenizer, split["eval"], seed))
    rows.append(accuracy("bert", bert, bert_tokenizer, split["eval"], seed))
    print(format_table(rows, index="model", columns=("metric",), intervals=True))
    cli.print_notes(rows)
    cli.say("continuing prompts")
    for i, prompt in enumerate(_PROMPTS):
        for temperature in (0.0, 0.8):
            key = jax.random.fold_in(jax.random.key(seed), i)
            print(
                f"[{temperature}] "
                f"{complete(gpt2, gpt2_tokenizer, prompt, temperature=temperature, key=key)}"
            )
    hashes = {
        name: model_hash(parameters(model)) for name, model in (("gpt2", gpt2), ("bert", bert))
    }
    text = {"source": _CORPUS.value, "corpus": sentences_fingerprint(sentences)}
    text |= {part: sentences_fingerprint(split[part]) for part in ("train", "eval")}
    write_results(out, "bundled_quality", config, rows, model_hash=hashes, text=text)
    print(f"Wrote {out / 'results.json'}.")


if __name__ == "__main__":
    cli.run(main)
